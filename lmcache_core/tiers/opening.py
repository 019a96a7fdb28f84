"""When a tier is opened: at the start, behind an engine that didn't wait, and again after it was down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lmcache_core.errors import BackendError, BackendUnavailable, LMCacheError
from lmcache_core.events import Event, TierDown

log = logging.getLogger(__name__)

OPEN_DEADLINE_S = 60.0
"""How long opening may go on behind an engine that has started without the tier."""
FIRST_DELAY_S = 1.0
MOST_DELAY_S = 60.0


class Opener:
    """Runs `open_tier(timeout_s)` on a thread of its own, one at a time, with a growing delay after failures.

    `open_tier` raises BackendError for a store that can't be reached (the tier is down, and tried again)
    and another LMCacheError for what no trying mends.
    """

    def __init__(
        self,
        tier: str,
        open_tier: Callable[[float], None],
        *,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._open_tier = open_tier
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._running = False
        self._stopped = False
        self._starting = False  # somebody waits in `start` for what opening says
        self._error: LMCacheError | None = None  # for that somebody
        self._again_at = float("inf")
        self._delay_s = FIRST_DELAY_S

    def start(self, wait_s: float) -> None:
        """Opens for the first time, waiting at most `wait_s`: then it goes on behind, the tier being down.

        Raises:
            LMCacheError: what `open_tier` raised in time, but for BackendError.
        """
        with self._lock:
            self._starting = self._running = True
        thread = self._thread()
        if thread is not None:
            thread.join(wait_s)
        with self._lock:
            self._starting = False
            late, error = self._running, self._error
        if error is not None:
            raise error
        if late:
            reason = f"not open after its deadline of {wait_s:g} s; opening goes on behind"
            log.warning("tier %s is down: %s", self._tier, reason)
            self._emit(TierDown(tier=self._tier, reason=reason))

    def again_if_due(self) -> None:
        """Opens a tier that is down once more, if it is time. Returns at once."""
        if self._clock() < self._again_at:
            return
        with self._lock:
            if self._running or self._stopped:
                return
            self._running = True
        self._thread()

    def retry_now(self) -> None:
        """Makes the next `again_if_due` due."""
        self._again_at = 0.0

    def stop(self) -> None:
        """Opens no more."""
        with self._lock:
            self._stopped = True

    def _thread(self) -> threading.Thread | None:
        """None, and another try later, where the system gives no thread."""
        thread = threading.Thread(target=self._run, name=f"lmcache {self._tier} open", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._running = False
                self._again_at = self._clock() + self._delay_s
            return None
        return thread

    def _run(self) -> None:
        error: LMCacheError | None = None
        try:
            self._open_tier(OPEN_DEADLINE_S)
        except LMCacheError as failure:
            error = failure
        except BaseException as failure:  # noqa: BLE001  (recorded boundary: plugin code below)
            error = BackendUnavailable(f"opening raised {type(failure).__name__}: {failure}")
        with self._lock:
            self._running = False
            handed_over = self._starting and error is not None and not isinstance(error, BackendError)
            if handed_over:
                self._error = error
            elif error is not None:
                self._again_at = self._clock() + self._delay_s
                self._delay_s = min(2 * self._delay_s, MOST_DELAY_S)
            else:
                self._again_at, self._delay_s = float("inf"), FIRST_DELAY_S
        if error is not None and not handed_over:
            log.warning("tier %s is down: %s", self._tier, error)
            self._emit(TierDown(tier=self._tier, reason=str(error)))
