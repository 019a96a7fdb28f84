"""The harness: how the suite makes one backend, reaches behind it, and how hard it tries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lmcache_core.config import parse_options
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance.baselines import RawDriver
from lmcache_core_conformance.behind import Behind
from lmcache_core_conformance.verdicts import Unproven

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Deviation:
    """A property that this backend is known not to keep. It must fail: a strict xfail.

    `property_name` is the test's name, `reason` what a user should know before choosing this backend.
    """

    property_name: str
    reason: str


class Harness(Behind, ABC):
    """Makes fresh instances of one backend. Subclass it; only `backend` and `fresh_config` are required.

    Methods that raise `Unproven`, here and in `Behind`, are optional hooks: a property that needs one is
    reported unproven until it is overridden. The attributes say how hard the suite tries; their defaults are
    what a published report needs.
    """

    backend: ClassVar[type[Backend[Any]]]
    """The backend's class, importable by its module and name: crash properties do so in a subprocess."""

    deviations: tuple[Deviation, ...] = ()
    capacity_bytes: int = 256 * MIB
    """The bound given to the backend in all but the capacity properties."""
    small_capacity_bytes: int = 16 * MIB
    """The bound that the capacity properties fill."""
    large_value_bytes: int = 64 * MIB
    """The largest value that is tried, where the backend's own maximum allows it."""
    deadline_s: float = 30.0
    """What one call may take."""
    stalled_deadline_s: float = 0.5
    """What one call may take while the medium stalls or trickles."""
    slack_s: float = 2.0
    """By how much a call may miss a deadline, and how soon a failure must be told."""
    limit_s: float = 120.0
    """What one property may take: beyond it, the backend hangs."""
    threads_end_s: float = 5.0
    """What a thread may take to end after `close`, which doesn't wait for it."""
    meeting_s: float = 2.0
    """How long calls wait for each other to be inside the backend at once."""
    rounds: int = 200
    """Repetitions of each racing worker."""
    interruptions: int = 150
    """Lines of a call, at most, at which another call is run in between."""
    examples: int = 40
    """Random sequences that are compared with a model."""
    crash_points: int = 24
    """Points at which a process is killed, for each operation; all of them where there are fewer."""
    measurements: int = 11
    """Rounds in which a figure and its baseline are timed in turn."""
    enforce_performance: bool = False
    """Whether a figure below its floor fails the performance group, which is reported in any case."""
    directory: Path | None = None
    """Where temporary directories are made, such as a mount to certify; None: the system's."""

    @abstractmethod
    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        """The options of an empty store, as a config file would give them under `options`.

        `tmp` is an empty directory of this store's own. The same options are used again to reopen it.
        """

    def small_config(self, tmp: Path) -> Mapping[str, object]:
        """As `fresh_config`, for a store that evicts by itself once it holds `small_capacity_bytes`.

        To be overridden where the store doesn't take its bound from the backend.
        """
        return self.fresh_config(tmp)

    def build(self, options: Mapping[str, object]) -> Backend[Any]:
        """The backend with these options, not yet opened."""
        config = parse_options(self.backend.config_class, options, "options")
        return self.backend(config)

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        """Options that are valid, with which `open` fails: a forbidden directory, a closed port."""
        raise Unproven("harness hook `unopenable_config` is missing")

    def medium_bytes(self, tmp: Path) -> int:
        """What the store made by `fresh_config(tmp)` occupies, seen from outside the backend.

        The default measures the files under `tmp`, for backends of medium `file`.
        """
        if self.backend_medium(tmp) != "file":
            raise Unproven("harness hook `medium_bytes` is missing")
        return sum(status.st_blocks * 512 for status in _files(tmp))

    def medium_objects(self, tmp: Path) -> int:
        """How many files (or objects, rows, keys) that store consists of, seen from outside."""
        if self.backend_medium(tmp) != "file":
            raise Unproven("harness hook `medium_objects` is missing")
        return len(_files(tmp))

    def raw_driver(self, tmp: Path) -> RawDriver:
        """The bare driver of the medium, which the backend's speed is compared with.

        Without it a memory backend is compared with a plain copy, a file backend with a loop of direct
        I/O in `tmp`.
        """
        raise Unproven("harness hook `raw_driver` is missing")

    def backend_medium(self, tmp: Path) -> str:
        """The declared medium of the backend."""
        medium: str = self.build(self.fresh_config(tmp)).capabilities.medium
        return medium


def _files(directory: Path) -> list[os.stat_result]:
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found.append(os.lstat(os.path.join(folder, name)))
            except FileNotFoundError:  # the backend removed it meanwhile
                continue
    return found
