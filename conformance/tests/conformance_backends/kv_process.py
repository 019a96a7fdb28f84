"""The server's process, started with the first store and ended with the tests, and the hooks behind it."""

from __future__ import annotations

import atexit
import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any


class KvProcess:
    """Commands to the server's process, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("kv_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()  # guards the pipes
        atexit.register(self._end)

    def ask(self, *words: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def get(self, port: int, name: str) -> bytes | None:
        text = self.ask("get", port, name)
        return None if text is None else base64.b64decode(text)

    def put(self, port: int, name: str, value: bytes) -> None:
        self.ask("put", port, name, base64.b64encode(value).decode())

    @contextmanager
    def faulty(self, port: int, fault: str) -> Iterator[None]:
        self.ask("fault", port, fault)
        try:
            yield
        finally:
            self.ask("fault", port, "")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


@cache
def kv_process() -> KvProcess:
    return KvProcess()
