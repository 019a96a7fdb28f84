"""Doing things at once, where each waits for another server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def at_once(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs all tasks, and returns when all have ended. One alone runs on this thread.

    Where the system gives no thread, a task is run here, after those before it in the list.

    Raises:
        BaseException: what a task has raised; the others have ended, too.
    """
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  # raised again below, on the caller's thread
            errors.append(error)

    threads = []
    for task in tasks[1:]:
        thread = threading.Thread(target=run, args=(task,), name="lmcache-redis", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            run(task)
        else:
            threads.append(thread)
    for task in tasks[:1]:
        run(task)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
