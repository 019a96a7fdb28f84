"""A server as a process of its own: started, killed, frozen and started again, and never left behind."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_core_conformance.network.wire import listen_on_a_free_port

_TIED = Path(__file__).with_name("tied.py")
_LINES_KEPT = 200
_POLL_S = 0.01
_ENDS_S = 10.0
"""How long output that a killed server's own children hold open is waited for."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, and that the kernel gives to nobody who asks for any.

    One of those that it gives could be a client's before it is used, or while its server is killed.
    """
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(listen_on_a_free_port()) for _ in range(count)]
        return [taken_now.getsockname()[1] for taken_now in sockets]


class ServerProcess:
    """One server, not yet started. Started again after a kill, it is the same command on the same port.

    `command` runs the server in the foreground: it must not make itself a daemon, nor be a client of one that
    does the work (`docker run`), which SIGKILL would not reach. `ready` says when it serves: some text of a
    line that it prints, or the port that then takes connections. `environment` is added to our own.

    The server is in a process group of its own, so Ctrl-C doesn't reach it, and is killed at the end of this
    process, by the kernel where this process itself is killed. Methods may be called from any thread, one at
    a time.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        ready: str | int,
        ready_within_s: float = 20.0,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(word) for word in command]
        self._ready = ready
        self._ready_within_s = ready_within_s
        self._directory = directory
        self._environment = {**os.environ, **(environment or {})}
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._run: _Run | None = None
        self._owner = os.getpid()
        atexit.register(self.kill)

    @property
    def output(self) -> str:
        """The last lines that it printed, on either stream, over all its lives."""
        return "".join(self._lines.copy())

    @property
    def pid(self) -> int:
        """The id of its process, which is its group's too; 0 while it isn't started."""
        return self._run.process.pid if self._run is not None else 0

    def start(self, *arguments: str, wait: bool = True) -> None:
        """Starts it, with more arguments for this once; returns when it serves, or at once without `wait`.

        Raises:
            OSError: there is no such directory, or no room for a process.
            RuntimeError: it runs already; it ended, or does not serve in time and was killed. The message has
                the end of its output.
        """
        if self._run is not None and self._run.process.poll() is None:
            raise RuntimeError(f"{self._command[0]} is started already")
        self.kill()  # what is left of one that has ended by itself
        run = self._run = _Run(
            [*self._command, *arguments], self._ready, self._lines, self._directory, self._environment
        )
        if wait and not run.wait_until_ready(self._ready_within_s):
            code = run.process.poll()
            self.kill()
            how = f"does not serve after {self._ready_within_s:g} s" if code is None else f"ended with {code}"
            raise RuntimeError(f"{self._command[0]} {how}. Its output:\n{self.output}")

    def kill(self) -> None:
        """SIGKILL to it and its children; returns when it is gone. Does nothing where it isn't started."""
        if self._run is not None and os.getpid() == self._owner:  # in a forked child it is the parent's
            run, self._run = self._run, None
            run.kill()

    @contextmanager
    def killed(self) -> Iterator[None]:
        """While inside, it is dead; then it is started again."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While inside, it is stopped: the kernel takes connections for it, and nothing is answered.

        Raises:
            RuntimeError: it isn't started.
        """
        group = self.pid
        if not group:  # which would be our own
            raise RuntimeError(f"{self._command[0]} is not started")
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)


class _Run:
    """One life of a server.

    The thread that reads its output also makes its process, since the kernel kills that with the thread, and
    whoever calls `start` may be a thread that ends soon.
    """

    def __init__(
        self,
        command: list[str],
        ready: str | int,
        lines: collections.deque[str],
        directory: Path | None,
        environment: dict[str, str],
    ) -> None:
        self.process: subprocess.Popen[str]
        self._command = [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), *command]
        self._ready = ready
        self._lines = lines
        self._directory = directory
        self._environment = environment
        self._is_made, self._told = threading.Event(), threading.Event()
        self._error: OSError | ValueError | None = None
        self._thread = threading.Thread(target=self._make_and_read, name=f"server-{command[0]}", daemon=True)
        self._thread.start()
        self._is_made.wait()
        if self._error is not None:
            raise self._error

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Whether it serves within that time. False as soon as it has ended."""
        if isinstance(self._ready, str):
            self._told.wait(timeout_s)
            return self._told.is_set() and self.process.poll() is None
        until, pause = time.monotonic() + timeout_s, threading.Event()
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._ready), 1.0):
                return self.process.poll() is None
            pause.wait(_POLL_S)
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._thread.join(_ENDS_S)

    def _make_and_read(self) -> None:
        try:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._environment,
                text=True,
                errors="replace",
                process_group=0,
            )
        except (OSError, ValueError) as error:
            self._error = error
            return
        finally:
            self._is_made.set()
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._lines.append(line)
                if isinstance(self._ready, str) and self._ready in line:
                    self._told.set()
        self.process.wait()  # a server that closed its output lives on, and so must this thread
        self._told.set()  # it has ended: whoever waits looks
