"""The disk tier keeps every property of the conformance suite that its capabilities give a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmcache_core_conformance import BackendConformance, Harness
from lmcache_core_disk.backend import DiskBackend


class DiskHarness(Harness):
    backend = DiskBackend

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {"path": str(tmp / "cache")}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        occupied = tmp / "occupied"
        occupied.write_text("a file where the directory's parent should be")
        return {"path": str(occupied / "cache")}


class TestDisk(BackendConformance):
    harness = DiskHarness()
