"""System calls that move less than they were asked to, or fail: what Linux may do to a store at any time."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lmcache_core_conformance.values import PAGE

_WRITES = ("write", "pwrite", "writev", "pwritev")
_READS = ("read", "pread", "readv", "preadv")
READS = (*_READS, "stat", "lstat", "fstat", "open")
"""What may fail while a value is read or looked at; `open` is Python's own, for reading."""
CHANGES = (*_WRITES, "unlink", "remove", "rename", "replace", "truncate", "ftruncate")

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]


class SystemCalls:
    """The functions of `os` by which this process uses one directory. Calls elsewhere go through as they are.

    A backend that reaches its files in another way, such as a native library, meets none of this: see `met`.
    """

    def __init__(self, directory: Path) -> None:
        self._roots = {os.path.abspath(directory), os.path.realpath(directory)}
        self.met = 0
        """How many calls were cut short or failed so far."""

    @contextmanager
    def moving_half(self) -> Iterator[None]:
        """While inside, what is asked to move more than a page moves whole pages, about half of it."""

        def short(call: Callable[..., Any]) -> Callable[..., Any]:
            def moved(descriptor: int, content: Any, *rest: Any) -> Any:
                half = _first_half(content)
                if half is None or not self._is_ours(descriptor):
                    return call(descriptor, content, *rest)
                self.met += 1
                return call(descriptor, half, *rest)

            return moved

        with _replaced((*_WRITES, *_READS), short):
            yield

    @contextmanager
    def failing(self, names: Sequence[str]) -> Iterator[None]:
        """While inside, the calls of these names fail as on a bad sector."""

        def fail(call: Callable[..., Any]) -> Callable[..., Any]:
            def failed(target: Any, *rest: Any, **named: Any) -> Any:
                writes = call is io.open and set("wax+") & set(rest[0] if rest else named.get("mode", "r"))
                directory = named.get("dir_fd", named.get("src_dir_fd"))
                if writes or not self._is_ours(target, directory):
                    return call(target, *rest, **named)
                self.met += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            return failed

        with _replaced(names, fail):
            yield

    def _is_ours(self, target: Any, directory: int | None = None) -> bool:
        """Whether a descriptor, or a path, is of the directory or below it."""
        try:
            if isinstance(target, int):
                path = os.readlink(f"/proc/self/fd/{target}")
            else:
                base = os.getcwd() if directory is None else os.readlink(f"/proc/self/fd/{directory}")
                path = os.path.abspath(os.path.join(base, os.fsdecode(target)))
        except OSError:
            return False
        return any(path == root or path.startswith(f"{root}/") for root in self._roots)


@contextmanager
def _replaced(names: Sequence[str], replacement: Replacement) -> Iterator[None]:
    places: list[tuple[ModuleType, str]] = [(os, name) for name in names if name != "open"]
    if "open" in names:
        places += [(io, "open"), (builtins, "open")]
    before = [(module, name, getattr(module, name)) for module, name in places]
    try:
        for module, name, call in before:
            setattr(module, name, replacement(call))
        yield
    finally:
        for module, name, call in before:
            setattr(module, name, call)


def _first_half(content: Any) -> Any:
    """About half of a length, a buffer or a list of buffers, in whole pages; None for what is too short."""
    if isinstance(content, int):
        return content // 2 // PAGE * PAGE or None
    pieces = [memoryview(piece).cast("B") for piece in content] if isinstance(content, list | tuple) else None
    if pieces is None:
        whole = memoryview(content).cast("B")
        half = len(whole) // 2 // PAGE * PAGE
        return whole[:half] if half else None
    left = sum(map(len, pieces)) // 2 // PAGE * PAGE
    taken = []
    for piece in pieces:
        if left > 0:
            taken.append(piece[:left])
            left -= len(piece)
    return taken or None
