"""A tier's worker threads: one more whenever those there are can't run all that waits and may."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lmcache_core.storage.traffic import Traffic
from lmcache_core.storage.transfer import Transfer

log = logging.getLogger(__name__)


class Crew:
    """Daemon threads that run transfers one after another until `traffic` closes."""

    def __init__(self, tier: str, traffic: Traffic, run: Callable[[Transfer], None]) -> None:
        self._tier = tier
        self._traffic = traffic
        self._run = run

    def call_in(self) -> list[Transfer]:
        """Starts a thread where one is of use. Returns what waits, if none starts and there is no other."""
        if not self._traffic.wants_thread:
            return []
        claim: list[int] = []  # who pops it has it: the thread, or we, when Ctrl-C came before the thread
        try:
            self._traffic.claim_thread(claim)
            if claim:
                name = f"lmcache-{self._tier}-{claim[0]}"
                threading.Thread(target=self._work, args=(claim,), name=name, daemon=True).start()
        except RuntimeError:  # the system refuses: the threads there are will do; without any, nothing runs
            return self._traffic.unclaim_thread() if _popped(claim) else []
        except BaseException:
            if _popped(claim):
                self._traffic.disclaim_thread()
            raise
        return []

    def _work(self, claim: list[int]) -> None:
        if not _popped(claim):
            return
        while (transfer := self._traffic.next()) is not None:
            try:
                self._run(transfer)
            except BaseException:  # recorded boundary: the other jobs need this thread
                log.exception("tier %s: a %s could not be run", self._tier, transfer.operation.value)
            del transfer  # keeps the job alive otherwise, until the next one comes


def _popped(claim: list[int]) -> bool:
    try:
        claim.pop()
    except IndexError:
        return False
    return True
