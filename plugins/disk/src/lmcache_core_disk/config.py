"""The options of the disk backend, with every default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory on a local file system, and how this machine's processes share it."""

    path: Path
    """The directory; it is created, with its parents, where it doesn't exist. Nothing outside is touched."""
    processes: Annotated[int, msgspec.Meta(ge=1, le=999)] = 1
    """How many processes use `path` at once (one a GPU rank): each gets an equal share of the capacity."""
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Reads and writes under way at once."""
    direct_io: bool = True
    """Bypass the page cache. Falls back by itself, with one warning, where the file system refuses."""
