"""Ways for values to lie on a Redis server, tried with bare sockets: what each costs, what eviction leaves.

    python benchmarks/redis_layouts.py [--rounds 15] [--malloc-conf dirty_decay_ms:-1,muzzy_decay_ms:-1]

Starts a `redis-server` of its own. Ways, all in pieces of 4 MiB - 4096 behind a version of 16 bytes:

- hash, renamed: HSETs into a temporary hash, one a piece, then UNLINK, RENAME and PERSIST of it;
- hash, transaction: MULTI, UNLINK, the HSETs, EXEC;
- strings, transaction: MULTI, a SET a piece and one of a head, EXEC;
- strings, head last: a SET a piece under names with the version, then the head's (old pieces stay until they
  expire or are deleted: their DEL is in the figure).

Ways run in turn on one connection, each overwriting its value. Reads ask for two pieces ahead. CPU is the
server's, all its threads. Eviction: values of 8 MiB are stored under `allkeys-lru` until four times what fits
has been, while a reader looks every value's description up after each store; then it is counted how many
of those that a lookup finds can't be read.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

MIB = 1 << 20
PIECE_NBYTES = 4 * MIB - 4096
SIZES_MIB = (1, 4, 32)
WINDOW = 2
EVICTION_NBYTES, VALUE_NBYTES = 256 * MIB, 8 * MIB
Command = Sequence[bytes | tuple[bytes, memoryview]]


class Server:
    """A connection to a server of its own."""

    def __init__(self, folder: str, malloc_conf: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder)
        environment = os.environ | ({"MALLOC_CONF": malloc_conf} if malloc_conf else {})
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replies = self.socket.makefile("rb")

    def send(self, *commands: Command) -> None:
        for command in commands:
            text = b"*%d\r\n" % len(command)
            for argument in command:
                if isinstance(argument, bytes):
                    text += b"$%d\r\n%b\r\n" % (len(argument), argument)
                else:
                    version, payload = argument
                    self.socket.sendall(text + b"$%d\r\n%b" % (len(version) + len(payload), version))
                    self.socket.sendall(payload)
                    text = b"\r\n"
            self.socket.sendall(text)

    def reply(self) -> object:
        line = self.replies.readline()
        kind, text = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(text.decode())
        if kind == b"*":
            return [self.reply() for _ in range(int(text))]
        if kind == b"$" and int(text) >= 0:
            return self.replies.read(int(text) + 2)[:-2]
        return None if kind == b"$" else text

    def ask(self, *commands: Command) -> list[object]:
        self.send(*commands)
        return [self.reply() for _ in commands]

    def receive(self, memory: memoryview) -> int:
        """Takes a piece into `memory` and returns its length."""
        nbytes = int(self.replies.readline()[1:]) - 16
        self.replies.read(16)
        self.replies.readinto(memory[:nbytes])
        self.replies.read(2)
        return nbytes

    @property
    def cpu_s(self) -> float:
        (text,) = self.ask((b"INFO", b"cpu"))
        assert isinstance(text, bytes)
        fields = dict(line.split(b":") for line in text.split() if b":" in line)
        return float(fields[b"used_cpu_user"]) + float(fields[b"used_cpu_sys"])


class Way:
    """A way to keep values: hashes, renamed into place or written in a transaction."""

    def __init__(self, server: Server, *, renamed: bool) -> None:
        self.server = server
        self._renamed = renamed

    def put(self, name: bytes, value: memoryview) -> None:
        target = name + b".tmp" if self._renamed else name
        version = secrets.token_bytes(16)
        pieces = [(b"HSET", target, b"%d" % i, (version, piece)) for i, piece in enumerate(cut(value))]
        head = (b"HSET", target, b"m", b"%d" % len(value))
        commands: list[Command] = [(b"MULTI",), (b"UNLINK", name), head, *pieces, (b"EXEC",)]
        if self._renamed:
            replace = ((b"UNLINK", name), (b"RENAME", target, name), (b"PERSIST", name))
            commands = [head, (b"PEXPIRE", target, b"60000"), *pieces, *replace]
        self.server.ask(*commands)

    def get(self, name: bytes, memory: memoryview) -> None:
        fetch(self.server, [(b"HGET", name, b"%d" % i) for i in range(num_pieces(len(memory)))], memory)

    def describe(self, name: bytes) -> bool:
        return self.server.ask((b"HGET", name, b"m"))[0] is not None

    def whole(self, name: bytes, nbytes: int) -> bool:
        return self.server.ask((b"HLEN", name))[0] == b"%d" % (1 + num_pieces(nbytes))


class Strings(Way):
    """Pieces and a head under names of their own; in a transaction, or with the version in their names."""

    def __init__(self, server: Server, *, versioned: bool) -> None:
        super().__init__(server, renamed=False)
        self._versioned = versioned
        self._pieces: dict[bytes, list[bytes]] = {}

    def put(self, name: bytes, value: memoryview) -> None:
        version = secrets.token_bytes(16)
        suffix = version.hex().encode() if self._versioned else b""
        old, names = (
            self._pieces.get(name, []),
            [b"%b:%b%d" % (name, suffix, i) for i in range(num_pieces(len(value)))],
        )
        sets = [(b"SET", piece, (version, memory)) for piece, memory in zip(names, cut(value), strict=True)]
        commands: list[Command] = [*sets, (b"SET", name, b"%d" % len(value))]
        if not self._versioned:
            commands = [(b"MULTI",), *commands, (b"EXEC",)]
        elif old:
            commands.append((b"UNLINK", *old))
        self.server.ask(*commands)
        self._pieces[name] = names

    def get(self, name: bytes, memory: memoryview) -> None:
        fetch(self.server, [(b"GET", piece) for piece in self._pieces[name]], memory)

    def describe(self, name: bytes) -> bool:
        return self.server.ask((b"GET", name))[0] is not None

    def whole(self, name: bytes, nbytes: int) -> bool:
        pieces = self._pieces[name]
        return self.server.ask((b"EXISTS", *pieces))[0] == b"%d" % len(pieces)


def num_pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE_NBYTES)


def cut(value: memoryview) -> list[memoryview]:
    return [value[at : at + PIECE_NBYTES] for at in range(0, len(value), PIECE_NBYTES)]


def fetch(server: Server, commands: Sequence[Command], memory: memoryview) -> None:
    server.send(*commands[:WINDOW])
    for sent, piece in enumerate(cut(memory), WINDOW):
        server.receive(piece)
        server.send(*commands[sent : sent + 1])


def measure(ways: dict[str, Way], rounds: int) -> None:
    titles = "".join(f"{f'{verb} GB/s':>10}{'worst to best':>16}{'CPU ms':>8}" for verb in ("put", "get"))
    print(f"{'':24}{titles}")
    for nbytes in (mib * MIB for mib in SIZES_MIB):
        value = memoryview(bytearray(secrets.token_bytes(MIB) * (nbytes // MIB)))
        seen: dict[str, tuple[list[float], list[float], list[float], list[float]]] = {}
        for _ in range(rounds + 1):
            for label, way in ways.items():
                lists = seen.setdefault(label, ([], [], [], []))
                for verb, (speeds, costs) in ((way.put, lists[:2]), (way.get, lists[2:])):
                    before, start = way.server.cpu_s, time.perf_counter()
                    count = max(1, 8 * MIB // nbytes)
                    for _ in range(count):
                        verb(label.encode(), value)
                    speeds.append(count * nbytes / (time.perf_counter() - start) / 1e9)
                    costs.append((way.server.cpu_s - before) / count * 1e3)
        for label, lists in seen.items():
            kept = [figures[1:] for figures in lists]
            cells = ""
            for speeds, costs in (kept[:2], kept[2:]):
                spread = f"{min(speeds):.2f} to {max(speeds):.2f}"
                cells += f"{statistics.median(speeds):10.2f}{spread:>16}{statistics.median(costs):8.2f}"
            print(f"{nbytes // MIB:>3} MiB {label:<16}{cells}", flush=True)
        for way in ways.values():
            way.server.ask((b"FLUSHALL",))


def evict(ways: dict[str, Way]) -> None:
    value = memoryview(bytearray(secrets.token_bytes(VALUE_NBYTES)))
    for label, way in ways.items():
        way.server.ask((b"FLUSHALL",), (b"CONFIG", b"SET", b"maxmemory", b"%d" % EVICTION_NBYTES))
        names = [b"value %d" % n for n in range(4 * EVICTION_NBYTES // VALUE_NBYTES)]
        for n, name in enumerate(names):
            way.put(name, value)
            for earlier in names[: n + 1]:
                way.describe(earlier)
        found = [name for name in names if way.describe(name)]
        torn = sum(not way.whole(name, VALUE_NBYTES) for name in found)
        print(f"eviction, {label}: {len(found)} values found by a lookup, {torn} of them can't be read")
        way.server.ask((b"CONFIG", b"SET", b"maxmemory", b"0"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--malloc-conf", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder, asked.malloc_conf)
        try:
            server.ask((b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru"))
            ways = {
                "hash, renamed": Way(server, renamed=True),
                "hash, MULTI": Way(server, renamed=False),
                "strings, MULTI": Strings(server, versioned=False),
                "strings, head": Strings(server, versioned=True),
            }
            print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {asked.rounds} rounds")
            measure(ways, asked.rounds)
            evict(ways)
        finally:
            server.socket.close()
            server.process.kill()
            server.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
