"""A plugin whose store raises at every put, as on a full disk: for processes that find it as installed."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import msgspec

from lmcache_core.sdk import (
    Backend,
    BackendSpec,
    BackendStats,
    Call,
    Capabilities,
    Host,
    Item,
    Outcome,
    Status,
    StorageKey,
    hookimpl,
)


@hookimpl
def lmcache_backends() -> list[BackendSpec]:
    return [BackendSpec("full", "full_plugin:Full", api=(1, 0))]


class FullConfig(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Full(Backend[FullConfig]):
    config_class = FullConfig

    def __init__(self, config: FullConfig) -> None:
        pass

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="file")

    def open(self, host: Host) -> None:
        pass

    def close(self) -> None:
        pass

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index in range(len(items)):
            call.done(index, Outcome(status=Status.MISS))

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index in range(len(keys)):
            call.done(index, Outcome(status=Status.MISS))

    def stats(self) -> BackendStats:
        return BackendStats()
