"""One call that may hang, on a daemon thread of its own, waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """Runs `function` once. Should it end after `give_up`, `too_late` follows on its thread.

    Raises:
        RuntimeError: the system starts no more threads.
    """

    def __init__(
        self, function: Callable[[], T], *, name: str, too_late: Callable[[], None] = lambda: None
    ) -> None:
        self._function = function
        self._too_late = too_late
        self._over = threading.Event()
        self._lock = threading.Lock()  # guards _given_up against the end of the call
        self._given_up = False
        self._result: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the call ended within `timeout_s`."""
        return self._over.wait(max(timeout_s, 0.0))

    def give_up(self) -> bool:
        """From now on nobody wants the result. False when the call has just ended."""
        with self._lock:
            if self._over.is_set():
                return False
            self._given_up = True
            return True

    def result(self) -> T:
        """What the ended call returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # noqa: BLE001  (recorded boundary: handed over by `result`)
            self._error = error
        with self._lock:
            self._over.set()
            given_up = self._given_up
        if given_up:
            self._too_late()
