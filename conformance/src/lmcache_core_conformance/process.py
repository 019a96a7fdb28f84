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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """While inside, SIGTERM raises `Terminated`, so that nothing is left behind. For the main thread."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def code_of(error: BaseException | None) -> int:
    """What the shell expects of a process that a signal ended."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


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
