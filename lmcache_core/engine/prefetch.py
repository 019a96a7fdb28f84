"""A prefetch under way: frames coming into memory in the background."""

from __future__ import annotations

from collections.abc import Generator

from lmcache_core.storage.threads import start_thread


class Prefetch:
    """Brings a prefix into the memory tier on a thread of its own; ends by itself.

    What has arrived is found by the next lookup. Each tier costs at most its deadline.
    """

    def __init__(self, arrivals: Generator[int, None, None]) -> None:
        self._arrivals = arrivals
        self._num_tokens = 0
        self._cancelled = False
        self._thread = start_thread(self._run, "lmcache prefetch", arrivals.close)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end; returns the tokens that are in memory so far.

        Where the system gives no thread, nothing is brought, and that is the end.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return self._num_tokens

    def cancel(self) -> None:
        """Stops after the frame that is arriving."""
        self._cancelled = True

    def _run(self) -> None:
        try:
            for num_tokens in self._arrivals:
                self._num_tokens += num_tokens
                if self._cancelled:
                    return
        finally:
            self._arrivals.close()
