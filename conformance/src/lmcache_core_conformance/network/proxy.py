"""The proxy of `wire.py` as a process: its ports, its faults, its count of requests."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.verdicts import Unproven

_WIRE = Path(__file__).with_name("wire.py")

NetworkFault = Literal["delayed", "half-closed", "killed", "partitioned", "reset", "stalled", "trickling"]
"""What a proxy can do to connections. Those that `Fault` has are as it says. Besides, `delayed` is every
answer 50 ms late, and `partitioned` that nothing passes either way; all connections break when that ends."""


class Proxy:
    """Stands in front of the servers with these ports of `host`, with a port of its own for each.

    It passes bytes and knows no protocol, so TLS may be inside. A value is cut by `RESET` and `HALF_CLOSED`
    after 16 KiB in one direction: shorter ones pass whole. For TCP only: a server on a Unix socket can still
    be killed and frozen.
    """

    def __init__(self, targets: Sequence[int], *, host: str = "127.0.0.1") -> None:
        """
        Raises:
            RuntimeError: it did not start; what it says stands on the standard error.
        """
        self._lock = threading.Lock()  # guards the pipes: one command at a time
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WIRE), host, *map(str, targets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is not for it: it ends with its input
        )
        self._owner = os.getpid()
        atexit.register(self.close)
        assert self._process.stdout is not None
        self.ports = [int(port) for port in self._process.stdout.readline().split()]
        """Where it listens, on 127.0.0.1, in the order of the targets."""
        if len(self.ports) != len(targets):
            raise RuntimeError("the proxy did not start")

    @property
    def port(self) -> int:
        """The port in front of the first target."""
        return self.ports[0]

    @property
    def num_requests(self) -> int:
        """How many requests were sent so far, answered or not.

        One is what a client sends on a connection after an answer, or at first. Where several are under way
        on a connection (HTTP/2, gRPC) that is too few: then ask the server itself.
        """
        return int(self._ask("requests"))

    @property
    def num_links(self) -> int:
        """How many connections neither side has ended."""
        return int(self._ask("links"))

    @contextmanager
    def faulty(self, fault: Fault | NetworkFault) -> Iterator[None]:
        """While inside, every connection has this fault, new ones too.

        Raises:
            ValueError: there is no such fault.
            Unproven: it is one that no network can have, `FULL` or `READ_ONLY`: only the server itself can.
        """
        name = fault.value if isinstance(fault, Fault) else fault
        if name not in get_args(NetworkFault):
            if isinstance(fault, Fault):
                raise Unproven(f"harness hook `faulty` leaves it to a proxy to make a medium {name}")
            raise ValueError(f"{name!r} is no fault of a network: {', '.join(get_args(NetworkFault))} are")
        self._ask(f"fault {name}")
        try:
            yield
        finally:
            self._ask("fault -")

    def close(self) -> None:
        """Ends it, and every connection through it. At the end of this process that is done anyway."""
        if os.getpid() == self._owner:  # in a forked child it is the parent's
            self._process.kill()
            self._process.communicate()

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(command + "\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except (OSError, ValueError):  # a broken pipe, or a closed one
                answer = ""
        if not answer:
            raise RuntimeError("the proxy has ended; what it said stands on the standard error")
        return answer
