"""No tier's directory lies inside another's: that one's capacity bounds everything in it."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.sdk import ConfigError
from lmcache_core_disk.files import Files
from lmcache_core_disk.small_files import FORMAT_FILE, check_format, read_small

_open_here: list[Path] = []
"""Real paths of the directories that this process has open. Each step on it is atomic by itself."""


def take_place(files: Files, place: Path) -> None:
    """Notes that the directory at the real path `place` is open here, until `leave_place`.

    Raises:
        ConfigError: a directory above it is a tier's, or one below it is open here. One below that nobody
            has open isn't looked for: it is refused when it is opened.
    """
    nested = [(place, above) for above in place.parents if _is_tier(files, above)]
    nested += [(below, place) for below in tuple(_open_here) if place in below.parents]
    for inner, outer in nested:
        raise ConfigError(
            f"path {inner} lies inside {outer}, which is the directory of another disk tier: give each a "
            f"directory of its own"
        )
    _open_here.append(place)


def leave_place(place: Path) -> None:
    _open_here.remove(place)


def _is_tier(files: Files, folder: Path) -> bool:
    try:
        return bool(check_format(read_small(files, str(folder / FORMAT_FILE)), folder))
    except (OSError, ConfigError):  # not to be read, or another program's
        return False
