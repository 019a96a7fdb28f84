"""The list of broken backends: which property each must fail, and which neighbours it may fail too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_core.storage.contract import Backend

B = TypeVar("B", bound=type[Backend[Any]])
ANYTHING = ("*",)


@dataclass(frozen=True)
class Broken:
    """`fails` must fail; those in `also` may (`ANYTHING`: all of them); every other must pass."""

    backend: type[Backend[Any]]
    fails: str
    also: tuple[str, ...]


CATALOGUE: list[Broken] = []


def breaks(fails: str, *, also: tuple[str, ...] = ()) -> Callable[[B], B]:
    """Enters a backend into the catalogue. Names are given without `test_`."""

    def enter(backend: B) -> B:
        CATALOGUE.append(Broken(backend, f"test_{fails}", tuple(f"test_{n}" if n != "*" else n for n in also)))
        return backend

    return enter
