"""How a tier's store is doing: what its breakers are told, and whether a failed call is worth repeating."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from lmcache_core.events import BreakerChanged, EventBus
from lmcache_core.storage.attempt import Attempt
from lmcache_core.storage.breaker import Breaker, BreakerState
from lmcache_core.storage.call import Operation
from lmcache_core.storage.faults import is_interrupt
from lmcache_core.storage.retry import RetryBudget

log = logging.getLogger(__name__)


class Health:
    """One breaker for what reads and one for what writes, and the budget of retries. Thread-safe."""

    def __init__(
        self,
        tier: str,
        read_breaker: Breaker,
        write_breaker: Breaker,
        retry: RetryBudget,
        events: EventBus,
        interrupted: Callable[[BaseException], None],
    ) -> None:
        """`interrupted` is told of a Ctrl-C that came inside an observer."""
        self.read_breaker = read_breaker
        self.write_breaker = write_breaker
        self.retry = retry
        self.events = events
        self._breakers = {each: write_breaker if each.writes else read_breaker for each in Operation}
        self._tier = tier
        self._interrupted = interrupted
        read_breaker.watch(partial(self._changed, "read"))
        write_breaker.watch(partial(self._changed, "write"))

    def of(self, operation: Operation) -> Breaker:
        return self._breakers[operation]

    def judge(self, operation: Operation, attempt: Attempt, *, closing: bool) -> None:
        """Tells the breaker of an attempt that is over, unless it has been told."""
        if attempt.judged:
            return
        if attempt.answered and not attempt.timed_out:
            self.of(operation).success()
        elif attempt.failure and not closing:
            self.of(operation).failure(attempt.failure)

    def can_retry(self, operation: Operation, attempt: Attempt, deadline: float, now: float) -> bool:
        """Whether a second attempt, should it take as long as the first, ends in time and may be made."""
        suffices = now + (now - attempt.started) < deadline
        return suffices and not self.of(operation).refusing and self.retry.try_spend()

    def _changed(self, operation: str, state: BreakerState, reason: str) -> None:
        event = BreakerChanged(tier=self._tier, operation=operation, state=state.value, reason=reason)
        try:
            self.events.emit(event)
        except BaseException as error:  # recorded boundary: the caller is in the middle of ending a call
            if is_interrupt(error):
                self._interrupted(error)
                return
            log.exception("tier %s: an observer raised", self._tier)
