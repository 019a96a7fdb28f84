"""What a plugin says about itself: specs, read without importing a driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One storage backend that a plugin offers.

    `name` is what a config file writes under `backend`. `target` is `module:attr`, imported only when
    a tier uses the backend. `api` is the version of `lmcache_core.sdk` the backend was written for:
    `API` as it was then, written out as numbers. `install_hint` says what to install when importing
    the target fails, such as `pip install redis`.

    Raises:
        ValueError: a field is malformed.
    """

    name: str
    target: str
    api: tuple[int, int]
    install_hint: str = ""

    def __post_init__(self) -> None:
        if not _matches(_NAME, self.name):
            raise ValueError(f"backend name {self.name!r}: use a-z, 0-9, '_' and '-', starting with a letter")
        if not _matches(_TARGET, self.target):
            raise ValueError(f"target {self.target!r} of backend {self.name!r} is not 'module:attribute'")
        if not _is_version(self.api):
            raise ValueError(f"api {self.api!r} of backend {self.name!r} is not (major, minor)")


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_version(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int and n >= 0 for n in value)


class PluginState(Enum):
    """Whether a plugin can be used."""

    OK = "ok"
    BROKEN = "broken"
    DUPLICATE = "duplicate"
    """Another distribution offers the same name; none of them is used."""
    TOO_NEW = "too-new"
    """Written for a later version of the contract than this core speaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One line of `lmcache-core plugins`: a backend, or an entry point that offers none.

    `cause` says why the state isn't OK, and what to do. `api` is None where no spec could be read.
    """

    name: str
    distribution: str
    version: str
    api: tuple[int, int] | None
    state: PluginState
    cause: str = ""
