"""Behind the backend: the hooks by which a harness reaches its medium, and the faults it can put there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path

from lmcache_core.identity.keys import StorageKey
from lmcache_core_conformance.verdicts import Unproven


class Fault(Enum):
    """What may be wrong with a store's medium for a while. All of it passes."""

    KILLED = "killed"
    """The server is gone, and so is every connection to it; then it is back, empty or not."""
    STALLED = "stalled"
    """Requests are taken and none is answered; the answers come when it ends. A partition looks so too."""
    TRICKLING = "trickling"
    """A value comes a few bytes at a time, more slowly than any deadline allows."""
    RESET = "reset"
    """Every connection is reset in the middle of a value, whichever way it travels."""
    HALF_CLOSED = "half-closed"
    """The server ends its side of a connection in the middle of a value, and keeps the other open."""
    FULL = "full"
    """The medium has no room for one byte more, whatever the backend's own count says."""
    READ_ONLY = "read-only"
    """Every change is refused for want of rights; reading goes on."""


class Behind:
    """Hooks of a `Harness` that act on the store of `fresh_config(tmp)`, past the backend.

    Each is optional: a property that needs a missing one is unproven. A memory tier has nothing behind
    it, and a file tier no server: such properties are not applicable there, and need no hook. (A file
    can be full, read-only and stalled all the same: `faulty` with FULL, READ_ONLY and STALLED.)

    Properties use them through `Reach`, which looks at what each did: one without effect fails them.
    """

    def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
        """The value that the medium holds under `key`, byte for byte; None for nothing."""
        raise Unproven("harness hook `raw_get` is missing")

    def raw_put(self, tmp: Path, key: StorageKey, value: bytes) -> None:
        """Makes `value`, of any length, what the medium holds under a `key` that was put before.

        As damage does it, or another program: what the store itself remembers of the value stays as it is.
        """
        raise Unproven("harness hook `raw_put` is missing")

    def raw_delete(self, tmp: Path, key: StorageKey) -> None:
        """Removes `key` from the medium as expiry does, or another program."""
        raise Unproven("harness hook `raw_delete` is missing")

    def litter(self, tmp: Path) -> None:
        """Leaves things of another program in the store, such as foreign files or keys.

        `medium_objects` counts them. The default, for backends of medium `file`, puts a file and a directory
        into each directory.
        """
        for folder, _, _ in list(os.walk(tmp)):
            (Path(folder) / "Foreign file.txt").write_text("not a value of this store")
            (Path(folder) / "Foreign directory").mkdir(exist_ok=True)

    def num_requests(self, tmp: Path) -> int:
        """How many requests the server has been sent so far, answered or not."""
        raise Unproven("harness hook `num_requests` is missing")

    def faulty(self, tmp: Path, fault: Fault) -> AbstractContextManager[None]:
        """While inside the context, the medium has this fault.

        Call this default for a fault that the harness can't make.
        """
        raise Unproven(f"harness hook `faulty` does not make a medium {fault.value}")

    def wrong_credentials(self, tmp: Path) -> Mapping[str, object]:
        """The options of that store with credentials it does not know."""
        raise Unproven("harness hook `wrong_credentials` is missing")

    def narrower_credentials(self, tmp: Path) -> Mapping[str, object]:
        """The options of that store with credentials that may do less than the backend declares."""
        raise Unproven("harness hook `narrower_credentials` is missing")
