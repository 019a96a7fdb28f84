"""A rank's side of the lookup protocol: answers the scheduler from this rank's cache."""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from lmcache_core.connectors.vllm import wire
from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.engine import Prefetch
from lmcache_core.identity import NamedContent

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.01
PREFIX = "lmcache-core-rank-"
MAX_PLACE_NBYTES = 75
"""So that a socket's path stays within the system's 107 bytes."""
STARTING_S = 60.0
"""A folder that is younger may belong to a worker that doesn't listen yet."""


class LookupServer:
    """Listens on a socket that only this user can reach, and answers whoever knows the nonce.

    One thread listens, one serves each connection; both are daemons.
    """

    def __init__(self, cache: GroupedCache) -> None:
        self._cache = cache
        self.nonce = os.urandom(wire.NONCE_NBYTES)
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place()))  # of mode 0700
        self.path = str(self._folder / "rank")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()  # guards `_connections` and `_closed`
        self._closed = False
        try:
            self._socket.bind(self.path)
            Path(self.path).chmod(0o600)
            self._socket.listen()
            threading.Thread(target=self._listen, name="lmcache lookups", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, set()
        for each in (self._socket, *connections):
            try:
                each.shutdown(socket.SHUT_RDWR)  # wakes its thread
            except OSError:
                log.debug("a socket was closed before")
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="lmcache lookups", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        arrivals: dict[int, Prefetch] = {}
        decoder = msgspec.msgpack.Decoder(wire.Call)
        try:
            nonce = wire.receive_exactly(connection, wire.NONCE_NBYTES)
            while hmac.compare_digest(nonce, self.nonce):
                wire.send(connection, self._answer(decoder.decode(wire.receive(connection)), arrivals))
        except (wire.WireError, msgspec.MsgspecError) as error:
            log.debug("a connection ended: %s", error)
        except Exception:  # recorded boundary: a thread of its own
            log.exception("a connection ended")
        finally:
            for arrival in arrivals.values():
                arrival.cancel()
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, call: wire.Call, arrivals: dict[int, Prefetch]) -> object:
        match call:
            case wire.Hold(names, limit):
                content = NamedContent(self._cache.model, names.hashes, names.tails)
                return wire.Found(*self._cache.hold(content, limit))
            case wire.Release(lookup_ids):
                self._cache.release(lookup_ids)
                return True
            case wire.BringNear(arrival_id, names):
                content = NamedContent(self._cache.model, names.hashes, names.tails)
                arrivals[arrival_id] = self._cache.bring_near(content)
                return True
            case wire.Arrived(arrival_id, wait_s):
                arrival = arrivals.get(arrival_id)
                if arrival is None:
                    return wire.Progress(True, [])
                arrival.wait(min(wait_s, MAX_WAIT_S))
                if done := arrival.done:
                    del arrivals[arrival_id]
                return wire.Progress(done, arrival.sources)
            case wire.Cancel(arrival_id):
                arrival = arrivals.pop(arrival_id, None)
                if arrival is None:
                    return wire.Progress(True, [])
                arrival.cancel()
                return wire.Progress(True, arrival.sources)


def _place() -> str:
    """Where sockets go: the folder for temporary files, unless its path is too long for that."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= MAX_PLACE_NBYTES else "/tmp"  # noqa: S108 - mkdtemp makes the folder


def _sweep() -> None:
    """Removes the sockets of this user's workers that were killed: vLLM ends workers so that are slow to."""
    for folder in Path(_place()).glob(f"{PREFIX}*"):
        try:
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < STARTING_S:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(str(folder / "rank"))
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            log.debug("%s is left alone: %s", folder, error)
