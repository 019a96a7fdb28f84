"""Makes a tier's failures visible: an event each, and a log line now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lmcache_core.events import Event, TierFailed
from lmcache_core.storage import Outcome

log = logging.getLogger(__name__)

LOG_EVERY_S = 30.0


class Failures:
    """Thread-safe. The first failure is logged at once, later ones at most every 30 seconds, counted."""

    def __init__(self, tier: str, emit: Callable[[Event], None], clock: Callable[[], float]) -> None:
        self._tier = tier
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # guards the two below
        self._unlogged = 0
        self._log_at = float("-inf")

    def note(self, operation: str, outcome: Outcome) -> None:
        """`outcome` is FAILED or TIMEOUT."""
        reason = str(outcome.error) if outcome.error is not None else outcome.status.value
        self._emit(TierFailed(tier=self._tier, operation=operation, reason=reason))
        with self._lock:
            self._unlogged += 1
            now = self._clock()
            if now < self._log_at:
                return
            count, self._unlogged, self._log_at = self._unlogged, 0, now + LOG_EVERY_S
        more = f" ({count} failures since the last line)" if count > 1 else ""
        log.warning("tier %s: a %s failed: %s%s", self._tier, operation, reason, more)
