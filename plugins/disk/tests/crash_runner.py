"""Runs a scenario once for every system call it makes, killed with SIGKILL at that call.

Run as a program: `crash_runner.py ROOT SCENARIO before|torn`. Run number n works in `ROOT/n` and dies at
its n-th changing call: before it, or (torn) after half of what it would have written. `ROOT/n.done` has
one byte for every operation that had returned. Ends with the first run that nothing killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scenarios import CAPACITY, SCENARIOS, UNHARMED
from support import MIB, Disk, Host, ProbedFiles

CHANGING = frozenset({"open", "pwritev", "mkdir", "rename", "unlink", "rmdir", "truncate"})


class KillingFiles(ProbedFiles):
    """Kills this process at its `last`-th changing call since it was armed."""

    def __init__(self, last: int, mode: str) -> None:
        super().__init__(self._count)
        self._armed = False
        self._left = last
        self._torn = mode == "torn"

    def _count(self, name: str, argument: object) -> None:
        if self._armed and name in CHANGING:
            self._left -= 1
            if self._left < 0 and not (self._torn and name == "pwritev"):
                os.kill(os.getpid(), signal.SIGKILL)

    def _arm(self) -> None:
        self._armed = True

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._left < 0:
            os.pwritev(fd, [buffers[0][: len(buffers[0]) // 2 // 4096 * 4096 or 20]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwritev(fd, buffers, offset)


def run(path: Path, done: int, scenario: str, files: KillingFiles) -> None:
    unharmed = UNHARMED.get(scenario, 0)
    if unharmed == 0:
        files._arm()
    if scenario == "merge":
        Disk(path, files=files, host=Host(capacity_bytes=3 * MIB), processes=1).close()
        return
    disk = Disk(path, files=files, host=Host(capacity_bytes=CAPACITY))
    for position, (kind, key, seed, pages) in enumerate(SCENARIOS[scenario]):
        if position == unharmed:
            files._arm()
        outcome = disk.put(key, seed, pages, parent=key) if kind == "put" else disk.delete(key)
        assert outcome.status.value in ("ok", "miss"), outcome
        os.write(done, b".")


def prepare_merge(path: Path) -> None:
    disks = [Disk(path, host=Host(capacity_bytes=3 * MIB), processes=2) for _ in range(2)]
    for number, disk in enumerate(disks):
        for value in range(4):
            disk.put(f"{number}-{value}", 10 * number + value, 2)
        disk.put("both", number, 2)
        disk.delete(f"{number}-3")
        disk.close()


def in_child(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(root: Path, scenario: str, mode: str) -> None:
    for number in range(100_000):
        path = root / f"{number}"
        if scenario == "merge":
            prepare_merge(path)
        done = os.open(root / f"{number}.done", os.O_WRONLY | os.O_CREAT, 0o600)
        status = in_child(lambda p=path, n=number, d=done: run(p, d, scenario, KillingFiles(n, mode)))
        os.close(done)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
