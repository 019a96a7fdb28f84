"""Opening and closing a backend without ever waiting longer than asked: either may hang."""

from __future__ import annotations

import logging

from lmcache_core.errors import BackendError, BackendUnavailable, LMCacheError
from lmcache_core.storage.checks import narrowed
from lmcache_core.storage.contract import Backend, C, Capabilities, Host
from lmcache_core.storage.errand import Errand
from lmcache_core.storage.faults import wrapped

log = logging.getLogger(__name__)


def open_backend(backend: Backend[C], host: Host, timeout_s: float) -> Capabilities:
    """Opens `backend` and returns what it offers. One that can't be opened is closed.

    Raises:
        ConfigError, PermissionDenied, BackendUnavailable: as the backend said.
        BackendUnavailable: it didn't return in time. Should it later, it is closed then.
        PluginError: it offers more than it declared.
        BackendError: it raised anything else.
    """
    errand = Errand(
        lambda: _open(backend, host),
        name=f"lmcache-open-{host.tier}",
        too_late=lambda: _close(backend, host.tier),
    )
    if not errand.wait(timeout_s) and errand.give_up():
        raise BackendUnavailable("did not open within its deadline", backend=host.tier, op="open")
    return errand.result()


def close_backend(backend: Backend[C], tier: str, timeout_s: float) -> None:
    """Closes `backend`, waiting for at most `timeout_s`. Never raises."""
    try:
        errand = Errand(lambda: _close(backend, tier), name=f"lmcache-close-{tier}")
    except RuntimeError:  # no thread starts: the process is ending, and the store with it
        log.exception("tier %s: not closed", tier)
        return
    errand.wait(timeout_s)


def _open(backend: Backend[C], host: Host) -> Capabilities:
    try:
        return narrowed(backend.capabilities, backend.open(host))
    except BaseException as error:
        _close(backend, host.tier)
        if isinstance(error, LMCacheError) and not isinstance(error, BackendError):
            raise
        raise wrapped(error, tier=host.tier, op="open") from None


def _close(backend: Backend[C], tier: str) -> None:
    try:
        backend.close()
    except BaseException:
        log.exception("tier %s: close raised, which the contract forbids", tier)
