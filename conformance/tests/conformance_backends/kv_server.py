"""A small key-value server over TCP, with a faulty wire: run as a process of the tests, by `kv_process.py`.

Each space has a port of its own, values, accounts and requests counted. Its wire stands between the socket
and the protocol, as a proxy would, and delays, trickles, cuts and resets what passes. Commands come as
JSON lines on the standard input.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import sys
import threading
import time
from collections import OrderedDict

REQUEST = struct.Struct(
    "<cHIQQ"
)  # verb, length of name, limit, offset or milliseconds, length of what follows
REPLY = struct.Struct(
    "<cQQQQ"
)  # status, length of what follows or of the value, token, entries and bytes stored
MOST_SPACES = 48
ACCOUNTS = {"open sesame": "rw", "read only": "r", "no deleting": "rwx"}
TRICKLE_S = 0.02


class Cut(Exception):
    """The wire ended the connection."""


class Space:
    """One store: its values, oldest use first, and the listening socket that leads to it."""

    def __init__(self) -> None:
        self.values: OrderedDict[str, tuple[bytes, int]] = OrderedDict()
        self.pins: dict[str, float] = {}
        self.capacity: int | None = None
        self.token = 0
        self.requests = 0
        self.fault = ""
        self.lock = threading.Lock()
        self.changed = threading.Condition()  # guards the fault
        self.connections: set[socket.socket] = set()
        self.port = 0
        self.listen()

    def listen(self) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", self.port))
        self.listener.listen(64)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.add(connection)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def kill(self) -> None:
        if self.listener.fileno() >= 0:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
        for connection in list(self.connections):
            reset(connection)

    def set_fault(self, fault: str) -> None:
        before = self.fault
        with self.changed:
            self.fault = fault
            self.changed.notify_all()
        if fault == "killed":
            self.kill()
        elif before == "killed":
            self.listen()

    # -- one connection --------------------------------------------------------------------------

    def serve(self, connection: socket.socket) -> None:
        rights = ""
        try:
            while True:
                verb, name_nbytes, limit, offset, nbytes = REQUEST.unpack(
                    self.receive(connection, REQUEST.size)
                )
                if self.fault == "killed":
                    raise Cut
                self.requests += 1
                name = self.receive(connection, name_nbytes).decode()
                content = self.receive(connection, nbytes, halfway=verb == b"P") if verb == b"P" else b""
                if verb == b"A":
                    rights = ACCOUNTS.get(name, "")
                    self.capacity = offset or self.capacity
                    granted = rights.encode()
                    self.reply(connection, b"K" if rights else b"D", len(granted), 0)
                    connection.sendall(granted)
                    continue
                self.reply(connection, *self.answer(verb, name, limit, offset, nbytes, content, rights))
        except (Cut, OSError, struct.error):
            pass
        finally:
            self.connections.discard(connection)
            connection.close()

    def receive(self, connection: socket.socket, nbytes: int, halfway: bool = False) -> bytes:
        """Reads; with the fault `reset`, ends in the middle of a value."""
        if halfway and self.fault == "reset":
            connection.recv(max(nbytes // 2, 1))
            reset(connection)
            raise Cut
        content = bytearray()
        while len(content) < nbytes:
            piece = connection.recv(min(nbytes - len(content), 1 << 20))
            if not piece:
                raise Cut
            content += piece
        return bytes(content)

    def reply(
        self, connection: socket.socket, status: bytes, nbytes: int, token: int, value: bytes = b""
    ) -> None:
        """The faulty wire of everything that is answered."""
        with self.lock:
            used = sum(len(stored) for stored, _ in self.values.values())
            head = REPLY.pack(status, nbytes, token, len(self.values), used)
        with self.changed:
            self.changed.wait_for(lambda: self.fault != "stalled")
        if value and self.fault in ("reset", "half-closed"):
            connection.sendall(head + value[: len(value) // 2])
            if self.fault == "reset":
                reset(connection)
                raise Cut
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
            raise Cut
        if value and self.fault == "trickling":
            connection.sendall(head)
            while value and self.fault == "trickling":
                connection.sendall(value[:16])
                value = value[16:]
                with self.changed:
                    self.changed.wait(TRICKLE_S)
            connection.sendall(value)
            return
        connection.sendall(head + value)

    # -- the store -------------------------------------------------------------------------------

    def answer(
        self, verb: bytes, name: str, limit: int, offset: int, nbytes: int, content: bytes, rights: str
    ) -> tuple[bytes, int, int] | tuple[bytes, int, int, bytes]:
        denied = (
            not rights
            or (verb in b"PX" and ("w" not in rights or self.fault == "read-only"))
            or (verb == b"X" and "x" in rights)
        )
        if verb == b"W":  # whether writing is allowed
            return b"D" if "w" not in rights or self.fault == "read-only" else b"K", 0, 0
        if denied:
            return b"D", 0, 0
        with self.lock:
            if verb == b"P":
                return self.put(name, content)
            if verb == b"L":
                return self.listing(name, limit)
            stored = self.values.get(name)
            if stored is None:
                return b"M", 0, 0
            value, token = stored
            if verb == b"X":
                del self.values[name]
                return b"K", 0, token
            if verb == b"N":
                self.pins[name] = max(self.pins.get(name, 0.0), time.monotonic() + offset / 1000)
                return b"K", len(value), token
            self.values.move_to_end(name)
            if verb == b"S":
                return b"K", len(value), token
            if limit == 0 and len(value) > nbytes:
                return b"T", len(value), token
            if limit and offset + nbytes > len(value):
                return b"M", 0, token
            part = value[offset : offset + nbytes]
            return b"K", len(part), token, part

    def put(self, name: str, content: bytes) -> tuple[bytes, int, int]:
        if self.fault == "full" or not self.make_room(name, len(content)):
            return b"F", 0, 0
        self.token += 1
        self.values[name] = (content, self.token)
        self.values.move_to_end(name)
        return b"K", len(content), self.token

    def make_room(self, name: str, nbytes: int) -> bool:
        """Evicts the least recently used values that aren't pinned; changes nothing if that won't do."""
        if self.capacity is None:
            return True
        now = time.monotonic()
        used = sum(len(value) for value, _ in self.values.values()) + nbytes
        used -= len(self.values[name][0]) if name in self.values else 0
        victims = []
        for other, (value, _) in self.values.items():
            if used <= self.capacity:
                break
            if other != name and self.pins.get(other, 0.0) <= now:
                victims.append(other)
                used -= len(value)
        if used > self.capacity:
            return False
        for victim in victims:
            del self.values[victim]
        return True

    def listing(self, name: str, limit: int) -> tuple[bytes, int, int, bytes]:
        prefix, _, after = name.partition("/")
        names = sorted(n for n in self.values if n.startswith(prefix) and n > after)
        rows = [f"{n} {len(self.values[n][0])} {self.values[n][1]}" for n in names[:limit]]
        text = "\n".join(rows).encode()
        return b"K", len(text), len(names) > limit, text


def reset(connection: socket.socket) -> None:
    """Ends a connection with RST."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads, which closes it
    except OSError:
        pass


def command(spaces: OrderedDict[int, Space], words: list[str]) -> object:
    if words[0] == "space":
        space = Space()
        spaces[space.port] = space
        while len(spaces) > MOST_SPACES:
            spaces.popitem(last=False)[1].kill()
        return space.port
    space = spaces[int(words[1])]
    if words[0] == "fault":
        space.set_fault(words[2])
    elif words[0] == "requests":
        return space.requests
    elif words[0] == "objects":
        return len(space.values)
    elif words[0] == "get":
        stored = space.values.get(words[2])
        return None if stored is None else base64.b64encode(stored[0]).decode()
    elif words[0] == "put":
        token = space.values[words[2]][1] if words[2] in space.values else 0
        space.values[words[2]] = (base64.b64decode(words[3]), token)
    elif words[0] == "delete":
        space.values.pop(words[2], None)
    return None


def main() -> None:
    spaces: OrderedDict[int, Space] = OrderedDict()
    for line in sys.stdin:
        print(json.dumps(command(spaces, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
