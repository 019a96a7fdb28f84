"""The harness for the backends in this package: as little work as still shows each fault for certain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance_backends.files import FileBackend
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance import Harness

MIB = 1 << 20


class SmallHarness(Harness):
    capacity_bytes = 16 * MIB
    small_capacity_bytes = MIB
    large_value_bytes = 2 * MIB
    limit_s = 20.0
    threads_end_s = 0.05
    meeting_s = 0.5
    rounds = 30
    interruptions = 20
    examples = 10
    crash_points = 24
    measurements = 2
    directory = (
        Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    )  # making directories there costs little

    def __init__(self, backend: type[Backend[Any]]) -> None:
        self._backend_class = backend

    @property
    def backend(self) -> type[Backend[Any]]:  # type: ignore[override]
        return self._backend_class

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {"path": str(tmp / "values")} if issubclass(self._backend_class, FileBackend) else {}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        (tmp / "occupied").write_text("a file where a directory should be")
        return {"path": str(tmp / "occupied" / "values")}
