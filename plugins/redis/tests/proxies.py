"""The proxy of `proxy.py` as a process: its ports, its faults, its count of requests."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .servers import free_ports

PROGRAM = Path(__file__).with_name("proxy.py")


class Proxy:
    """Stands in front of the servers with these ports, in that order."""

    def __init__(self, targets: Sequence[int]) -> None:
        self.ports = free_ports(len(targets))
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(PROGRAM),
                *(f"{port}:{to}" for port, to in zip(self.ports, targets, strict=True)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)
        self._lock = threading.Lock()  # guards the pipes: one command at a time
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the proxy did not start")

    @property
    def num_requests(self) -> int:
        return int(self._ask("requests"))

    @property
    def num_links(self) -> int:
        """How many connections neither side has ended."""
        return int(self._ask("links"))

    @contextmanager
    def faulty(self, fault: str) -> Iterator[None]:
        """While inside, every connection has this fault: one that `proxy.py` knows by name."""
        self._ask(f"fault {fault}")
        try:
            yield
        finally:
            self._ask("fault -")

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
