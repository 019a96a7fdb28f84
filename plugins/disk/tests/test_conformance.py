"""The disk tier keeps every property of the conformance suite that its capabilities give a meaning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from lmcache_core.config import parse_options
from lmcache_core.sdk import StorageKey
from lmcache_core_conformance import BackendConformance, Harness
from lmcache_core_conformance.behind import Fault
from lmcache_core_disk.backend import DiskBackend
from lmcache_core_disk.config import DiskConfig

from .behind import FaultyFiles, slot_file


class DiskHarness(Harness):
    backend = DiskBackend

    def __init__(self) -> None:
        self._files: defaultdict[Path, FaultyFiles] = defaultdict(FaultyFiles)

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {"path": str(tmp / "cache")}

    def build(self, options: Mapping[str, object]) -> DiskBackend:
        config = parse_options(DiskConfig, options, "conformance harness")
        return DiskBackend(config, files=self._files[config.path])

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        occupied = tmp / "occupied"
        occupied.write_text("a file where the directory's parent should be")
        return {"path": str(occupied / "cache")}

    def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
        file = slot_file(tmp / "cache", key)
        return file.read_bytes() if file is not None and file.exists() else None

    def raw_put(self, tmp: Path, key: StorageKey, value: bytes) -> None:
        file = slot_file(tmp / "cache", key)
        assert file is not None, f"{key} was not stored"
        file.write_bytes(value)

    def raw_delete(self, tmp: Path, key: StorageKey) -> None:
        file = slot_file(tmp / "cache", key)
        assert file is not None, f"{key} was not stored"
        file.unlink()

    def faulty(self, tmp: Path, fault: Fault) -> AbstractContextManager[None]:
        return self._files[tmp / "cache"].faulty(fault)


class TestDisk(BackendConformance):
    harness = DiskHarness()
    harness.slack_s = 10.0  # of a busy machine; its report is made with the suite's own
