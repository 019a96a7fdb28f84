"""Every system call of this backend, in one place: tests replace it to fail, to kill and to watch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence


class Files:
    """Plain system calls on names relative to an open directory. Raises OSError as the system does.

    Names resolve under a directory's descriptor, never its path: a directory that was deleted and made
    anew by another process is not mistaken for ours.
    """

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        # O_NONBLOCK: of no effect on a file, and a FIFO put in its place fails instead of blocking for good.
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)

    def open_directory(self, name: str, dir_fd: int | None = None) -> int:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def mkdir(self, name: str, dir_fd: int) -> None:
        os.mkdir(name, 0o700, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def list(self, dir_fd: int) -> list[str]:
        return os.listdir(dir_fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def rename(self, source: str, target: str, source_fd: int, target_fd: int) -> None:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def set_buffered(self, fd: int) -> None:
        """Sends what follows on this descriptor through the page cache."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def lock(self, fd: int) -> bool:
        """Takes the file's exclusive lock, which ends with the process; False when another holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
