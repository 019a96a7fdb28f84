"""The harness for the backends in this package: as little work as still shows each fault for certain."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from conformance_backends.files import FileBackend, Medium
from conformance_backends.kv_process import kv_process
from conformance_backends.network import NetworkBackend
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance import Harness, Result, run
from lmcache_core_conformance.baselines import PlainCopy, RawDriver
from lmcache_core_conformance.behind import Fault

MIB = 1 << 20
LIMITS_S = (1.0, 4.0, 16.0, 64.0)


class SmallHarness(Harness):
    capacity_bytes = 16 * MIB
    small_capacity_bytes = MIB
    large_value_bytes = 2 * MIB
    limit_s = 60.0
    stalled_deadline_s = 0.04
    slack_s = 2.0
    threads_end_s = 2.0
    meeting_s = 1.0
    rounds = 30
    interruptions = 20
    examples = 15
    crash_points = 24
    measurements = 2
    directory = (
        Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    )  # making directories there costs little

    def __init__(self, backend: type[Backend[Any]]) -> None:
        self._backend_class = backend
        self._ports: dict[Path, int] = {}

    @property
    def backend(self) -> type[Backend[Any]]:  # type: ignore[override]
        return self._backend_class

    @property
    def _is_network(self) -> bool:
        return issubclass(self._backend_class, NetworkBackend)

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        if self._is_network:
            self._ports[tmp] = kv_process().ask("space")
            return self._account(tmp, "open sesame")
        return {"path": str(tmp / "values")} if issubclass(self._backend_class, FileBackend) else {}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        if self._is_network:
            return {"port": 1, "password": "open sesame"}
        (tmp / "occupied").write_text("a file where a directory should be")
        return {"path": str(tmp / "occupied" / "values")}

    # -- behind the backend ----------------------------------------------------------------------

    def raw_get(self, tmp: Path, key: StorageKey) -> bytes | None:
        if self._is_network:
            return kv_process().get(self._ports[tmp], key)
        path = tmp / "values" / key
        return path.read_bytes() if path.exists() else None

    def raw_put(self, tmp: Path, key: StorageKey, value: bytes) -> None:
        if self._is_network:
            kv_process().put(self._ports[tmp], key, value)
        else:
            (tmp / "values" / key).write_bytes(value)

    def raw_delete(self, tmp: Path, key: StorageKey) -> None:
        if self._is_network:
            kv_process().ask("delete", self._ports[tmp], key)
        else:
            (tmp / "values" / key).unlink()

    def litter(self, tmp: Path) -> None:
        if self._is_network:
            kv_process().put(self._ports[tmp], "Foreign:key", b"not a value of this store")
        else:
            super().litter(tmp)

    def medium_objects(self, tmp: Path) -> int:
        if self._is_network:
            return int(kv_process().ask("objects", self._ports[tmp]))
        return super().medium_objects(tmp)

    def num_requests(self, tmp: Path) -> int:
        return int(kv_process().ask("requests", self._ports[tmp]))

    def faulty(self, tmp: Path, fault: Fault) -> AbstractContextManager[None]:
        if self._is_network:
            return kv_process().faulty(self._ports[tmp], fault.value)
        return Medium.of(tmp / "values").faulty(fault.value)

    def wrong_credentials(self, tmp: Path) -> Mapping[str, object]:
        return self._account(tmp, "open barley")

    def narrower_credentials(self, tmp: Path) -> Mapping[str, object]:
        return self._account(tmp, "no deleting")

    def raw_driver(self, tmp: Path) -> RawDriver:
        return PlainCopy() if self._is_network else super().raw_driver(tmp)

    def _account(self, tmp: Path, password: str) -> Mapping[str, object]:
        return {"port": self._ports[tmp], "password": password}


def judged_hanging(harness: SmallHarness, name: str, *stands: str) -> Result:
    """The verdict on a property that hangs. It is given more time until it says of `stands` that it came so
    far, which a busy machine may need."""
    for harness.limit_s in LIMITS_S:
        [result] = run(harness, properties=[name]).results
        if all(stand in result.reason for stand in stands):
            break
    return result
