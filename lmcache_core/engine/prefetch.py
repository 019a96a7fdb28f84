"""A prefetch under way: frames coming into memory in the background."""

from __future__ import annotations

import threading
from collections.abc import Generator

from lmcache_core.engine.plan import Plan


class Prefetch:
    """Brings a prefix into the memory tiers on a thread of its own; ends by itself.

    `num_planned_tokens` is what it set out for. What has arrived is found by the next lookup. Each tier
    costs at most its deadline.
    """

    def __init__(self, plan: Plan, frames: Generator[int, None, None]) -> None:
        self.num_planned_tokens = plan.num_tokens
        self._frames = frames
        self._arrived = plan.start * plan.chunk_tokens
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="lmcache prefetch", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end; returns the tokens that are in memory so far."""
        self._thread.join(timeout_s)
        return self._arrived

    def cancel(self) -> None:
        """Stops after the frame that is arriving."""
        self._cancelled = True

    def _run(self) -> None:
        try:
            for num_tokens in self._frames:
                self._arrived += num_tokens
                if self._cancelled:
                    return
        finally:
            self._frames.close()
