"""Becomes another program, in a process that the kernel kills when the thread that made it ends.

    python tied.py PARENT_ID COMMAND [ARGUMENT ...]

Run as a program, since between fork and exec of a process with threads no Python code may be trusted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 (the harness's own command; keeps what the kernel was told)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
