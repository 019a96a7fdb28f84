"""Backends on a directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .support import Disk


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Opens backends on one directory, and closes them when the test ends."""
    opened: list[Disk] = []

    def open_(**options: object) -> Disk:
        disk = Disk(tmp_path / "cache", **options)  # type: ignore[arg-type]
        opened.append(disk)
        return disk

    yield open_
    for disk in opened:
        disk.close()


@pytest.fixture
def disk(open_disk: Callable[..., Disk]) -> Disk:
    return open_disk()
