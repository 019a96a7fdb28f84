"""The small files that say what a directory is: of a known format, read whole, replaced whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lmcache_core.sdk import ConfigError
from lmcache_core_disk.direct_io import PAGE
from lmcache_core_disk.files import Files

FORMAT = 1
FORMAT_FILE = "format.json"
"""Every tier's directory has one."""


def check_format(text: bytes, where: Path) -> dict[str, object]:
    """The fields of a format or meta file.

    Raises:
        ConfigError: another version wrote it, or it is none of ours.
    """
    fields = read_fields(text)
    if fields.get("format") == FORMAT:
        return fields
    found = fields.get("format")
    raise ConfigError(
        f"{where} says format {found!r}, and this version of lmcache-core-disk knows {FORMAT}: nothing was "
        f"changed; install the version that wrote it, or choose another path"
    )


def read_fields(text: bytes) -> dict[str, object]:
    """What a format or meta file says; nothing for what isn't readable."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def read_small(files: Files, name: str, dir_fd: int | None = None) -> bytes:
    """A file of at most a page; empty when it doesn't exist."""
    try:
        fd = files.open(name, os.O_RDONLY, dir_fd)
    except FileNotFoundError:
        return b""
    try:
        content = bytearray(PAGE)
        return bytes(content[: files.preadv(fd, [memoryview(content)], 0)])
    finally:
        files.close(fd)


def write_small(files: Files, name: str, content: bytes, dir_fd: int) -> None:
    """Replaces a file whole or not at all."""
    fd = files.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd)
    try:
        files.pwritev(fd, [memoryview(content)], 0)
    finally:
        files.close(fd)
    files.rename(f"{name}.new", name, dir_fd, dir_fd)
