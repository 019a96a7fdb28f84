"""The files that a run writes: judged before it begins, and each there whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from lmcache_core.errors import LMCacheError
from lmcache_core_conformance.report import ReportDocument

_BEGINNING_NBYTES = 4096


class OutputError(LMCacheError):
    """A file can't be written; the message says which, and why."""


class Output:
    """One file that is to be written at the end, by `encode`; `mark` stands early in each such file.

    Raises:
        OutputError: it is not a regular file, its directory isn't there, nothing can be written there, or
            what is there was not written by an earlier run.
    """

    def __init__(self, path: Path, encode: Callable[[ReportDocument], bytes], mark: bytes) -> None:
        self._named = path
        self._encode = encode
        self._mark = mark
        self._target = Path(os.path.realpath(path))  # the link stays, and what it leads to is replaced
        self._temporary = self._target.with_name(f".conformance-{os.getpid()}-{id(self):x}")
        try:
            self._check()
        except OSError as error:
            raise OutputError(f"can't write {path}: {error.strerror}") from error

    def is_same(self, other: Output) -> bool:
        return self._target == other._target

    def remove(self) -> None:
        """Takes away what an earlier run left, which would look like the result of this one.

        Raises:
            OutputError: it can't be removed.
        """
        try:
            self._target.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"can't replace {self._named}: {error.strerror}") from error

    def write(self, document: ReportDocument) -> None:
        """
        Raises:
            OutputError: it can't be written; then nothing of it is there.
        """
        try:
            self._temporary.write_bytes(self._encode(document))
            os.replace(self._temporary, self._target)
        except OSError as error:
            raise OutputError(f"can't write {self._named}: {error.strerror}") from error
        finally:
            self._temporary.unlink(missing_ok=True)

    def _check(self) -> None:
        if not self._target.parent.is_dir():
            raise OutputError(f"can't write {self._named}: there is no directory {self._named.parent}")
        try:
            mode = os.stat(self._target).st_mode
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISREG(mode):
                what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise OutputError(f"can't write {self._named}: it is {what}")
            if not os.access(self._target, os.W_OK):
                raise OutputError(f"can't write {self._named}: it is read-only")
            self._check_that_it_may_go()
        try:
            self._temporary.touch(exist_ok=False)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _check_that_it_may_go(self) -> None:
        with self._target.open("rb") as file:
            beginning = file.read(_BEGINNING_NBYTES)
        if beginning and self._mark not in beginning:  # the harness, or the file of options, say
            raise OutputError(
                f"can't write {self._named}: it is there, and no report of an earlier run; "
                "remove it, or choose another name"
            )


def writable(directory: Path) -> Path:
    """That directory, for temporary ones.

    Raises:
        OutputError: none can be made in it.
    """
    try:
        Path(tempfile.mkdtemp(prefix=".conformance-", dir=directory)).rmdir()
    except OSError as error:
        raise OutputError(f"can't write in {directory}: {error.strerror}") from error
    return directory
