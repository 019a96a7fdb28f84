"""How the command's process ends: when it is told to, and although threads of the backend go on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import click

_PATIENCE_S = 5.0


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends the run as Ctrl-C does."""


class Told:
    """Which signal has told the process to end, also where what it raised was swallowed."""

    def __init__(self) -> None:
        self._number = 0

    def end(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self._number = number
        self.check()

    def check(self) -> None:
        """
        Raises:
            KeyboardInterrupt: a signal has come; `Terminated` for SIGTERM.
        """
        if self._number:
            raise Terminated if self._number == signal.SIGTERM else KeyboardInterrupt

    @property
    def code(self) -> int:
        """What the shell expects of a process that this signal ended."""
        return 128 + (self._number or signal.SIGINT)


@contextlib.contextmanager
def terminable() -> Iterator[Told]:
    """While inside, SIGTERM and Ctrl-C raise, so that nothing is left behind. For the main thread.

    What a signal raises is lost where it comes amid a destructor: long work asks `Told.check` now and then.
    """
    told = Told()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] == signal.SIG_IGN:  # as under nohup
        del before[signal.SIGINT]
    for number in before:
        signal.signal(number, told.end)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def not_kept_by_threads() -> Iterator[None]:
    """Once left by the end of a command, the process ends soon, whatever threads were started inside.

    At its end Python waits for threads that are no daemons, and for those of its own pools: a backend that
    hangs has some that never end.
    """
    before = frozenset(threading.enumerate())
    try:
        yield
    except (click.exceptions.Exit, click.ClickException) as error:
        if set(threading.enumerate()) - before:
            threading.Thread(target=_end, args=(error.exit_code,), daemon=True).start()
        raise


def _end(code: int) -> None:
    """Ends the process if it is still waiting for threads after a while."""
    threading.Event().wait(_PATIENCE_S)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("threading", "_shutdown"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        frame = frame.f_back
