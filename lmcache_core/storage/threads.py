"""Starting a daemon thread so that Ctrl-C leaves no doubt whether it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(
    work: Callable[[], None], name: str, never: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Starts a thread that runs `work`. Where the system gives none, `never` runs, and nothing is raised:
    the thread isn't alive then.

    Raises:
        KeyboardInterrupt: Ctrl-C came; `never` has run, or `work` runs.
    """
    claim = [work]  # who pops it has it: the thread, or we

    def run() -> None:
        if claimed := _pop(claim):
            claimed()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except BaseException as error:
        if _pop(claim):
            never()
        if not isinstance(error, RuntimeError):
            raise
        if isinstance(error.__context__, KeyboardInterrupt):  # what becomes of one inside `Condition.wait`
            raise error.__context__ from None
    return thread


def _pop(claim: list[Callable[[], None]]) -> Callable[[], None] | None:
    try:
        return claim.pop()
    except IndexError:
        return None
