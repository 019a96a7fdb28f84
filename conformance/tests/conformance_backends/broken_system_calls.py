"""Broken beneath the surface: waits, owners, and system calls that move less than asked or fail."""

from __future__ import annotations

from conformance_backends.catalogue import breaks
from conformance_backends.files import FileBackend
from lmcache_core.storage.contract import BackendStats

# -- waits and owners ----------------------------------------------------------------------------


@breaks("stats_are_told_while_a_put_stalls")
class CountsUnderTheLockOfItsWrites(FileBackend):
    def stats(self) -> BackendStats:
        with self.lock:
            return super().stats()


@breaks("a_store_that_is_not_shared_has_one_owner_or_one_bound")
class SharesItsDirectoryUnawares(FileBackend):
    def take(self) -> None:
        return
