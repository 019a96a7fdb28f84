"""A prefetch under way: frames coming into memory in the background."""

from __future__ import annotations

from collections.abc import Generator

from lmcache_core.storage.threads import start_thread


class Prefetch:
    """Brings a prefix into the memory tier on a thread of its own; ends by itself.

    What has arrived is found by the next lookup. Each tier costs at most its deadline.
    """

    def __init__(self, arrivals: Generator[tuple[str, int], None, None]) -> None:
        """`arrivals` yields each frame's tier and number of tokens."""
        self._arrivals = arrivals
        self._sources: list[tuple[str, int]] = []
        self._cancelled = False
        self._thread = start_thread(self._run, "lmcache prefetch", arrivals.close)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def sources(self) -> list[tuple[str, int]]:
        """(tier, tokens) of each frame that is in memory so far, first token first: where it was found."""
        return self._sources.copy()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end; returns the tokens that are in memory so far.

        Where the system gives no thread, nothing is brought, and that is the end.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return sum(num_tokens for _, num_tokens in self._sources)

    def cancel(self) -> None:
        """Stops after the frame that is arriving."""
        self._cancelled = True

    def _run(self) -> None:
        try:
            for source in self._arrivals:
                self._sources.append(source)
                if self._cancelled:
                    return
        finally:
            self._arrivals.close()
