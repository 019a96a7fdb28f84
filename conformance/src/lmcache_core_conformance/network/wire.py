"""A TCP proxy with faults, as a program of its own: it shares no interpreter lock with what is tested.

    python wire.py HOST TARGET_PORT [TARGET_PORT ...]

Listens on a port of 127.0.0.1 for each target, and prints those ports. Then it answers each line of its
input with one: `fault NAME` (none: `fault -`) with `done`, `requests` with how many were sent so far,
`links` with how many connections neither side has ended. It ends with its input, and so with its parent.

A request is what a client sends on a connection after an answer, or at first. While connections are cut
in the middle of a value, each carries one request at most. Bytes are only counted, so TLS may be inside.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
import threading

CUT = 16 << 10
"""Where a value is cut: past every handshake, and before the end of the values that are cut."""
PROMPT = 256
"""How much of a trickling answer comes at once."""
TRICKLE_S = 0.02
DELAY_S = 0.05
CONNECT_S = 10.0
BUFFER_NBYTES = 1 << 20
FIRST_PORT, NUM_PORTS = 10_000, 22_768
"""Below those that Linux gives to whoever asks for any."""

CUTTING = ("reset", "half-closed")


def listen_on_a_free_port() -> socket.socket:
    """A socket that listens on a port which the kernel gives to nobody else, also once this one is closed."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", FIRST_PORT + secrets.randbelow(NUM_PORTS)), backlog=512)


class Medium:
    """The fault in force, the connections, and the count of requests."""

    def __init__(self) -> None:
        self.fault = ""
        self.num_requests = 0
        self.changed = threading.Condition()  # guards everything here and in the links
        self.links: set[Link] = set()

    def set(self, fault: str) -> None:
        with self.changed:
            before, self.fault = self.fault, fault
            for link in self.links:
                link.passed = {"up": 0, "down": 0}
            self.changed.notify_all()
            links = list(self.links) if "killed" in (fault, before) or before == "partitioned" else []
        for link in links:
            link.reset()

    def num_links(self) -> int:
        with self.changed:
            return sum(not link.num_ended for link in self.links)

    def hold_while(self, *faults: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.fault not in faults)


class Link:
    """One client's connection and ours to the server, with a thread for each direction."""

    def __init__(self, medium: Medium, client: socket.socket, target: tuple[str, int]) -> None:
        self.passed = {"up": 0, "down": 0}
        self._medium = medium
        self._client = client
        self._server = socket.create_connection(target, CONNECT_S)
        self._server.settimeout(None)
        self._answered = True
        self.num_ended = 0
        self._is_reset = False
        for end in (self._client, self._server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with medium.changed:
            if medium.fault == "killed":  # since this was taken
                self._server.close()
                raise ConnectionResetError
            medium.links.add(self)
        ways = ((self._client, self._server, "up"), (self._server, self._client, "down"))
        for source, target_end, way in ways:
            threading.Thread(target=self._pump, args=(source, target_end, way), daemon=True).start()

    def reset(self) -> None:
        self._is_reset = True
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads; closing then sends the reset

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        buffer = memoryview(bytearray(BUFFER_NBYTES))
        try:
            while True:
                if self._medium.fault == "partitioned":
                    self._medium.hold_while("partitioned")
                count = source.recv_into(buffer)
                if not count or self._is_reset:  # what came after the reset can still be read
                    break
                if not self._pass(buffer[:count], target, way):
                    return
            if not self._is_reset:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            self.reset()
        finally:
            self._ended()

    def _pass(self, content: memoryview, target: socket.socket, way: str) -> bool:
        """Hands on what was received, as the fault has it. False: this connection is done for."""
        fault = self._count(len(content), way)
        if fault in CUTTING and self.passed[way] > CUT:
            target.sendall(content[: max(CUT - self.passed[way] + len(content), 0)])
            return self._cut(fault, way)
        if way == "down":
            if fault in ("stalled", "partitioned"):
                self._medium.hold_while("stalled", "partitioned")
            elif fault == "delayed":
                self._wait(DELAY_S)
            elif fault == "trickling" and self.passed[way] > PROMPT:
                content = self._trickle(content, target)
        target.sendall(content)
        return True

    def _count(self, nbytes: int, way: str) -> str:
        """Counts what passes; the fault in force."""
        with self._medium.changed:
            self.passed[way] += nbytes
            if way == "up" and self._answered:
                self._answered = False
                self._medium.num_requests += 1
            elif way == "down" and self._medium.fault not in CUTTING:
                self._answered = True
            return self._medium.fault

    def _cut(self, fault: str, way: str) -> bool:
        if fault == "reset":
            self.reset()
            return False
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_WR)  # the server's side has ended; ours stays open
        if way == "up":
            while self._client.recv(CUT):
                pass
            self._server.shutdown(socket.SHUT_RDWR)
        return False

    def _trickle(self, content: memoryview, target: socket.socket) -> memoryview:
        """Sends byte by byte while the fault lasts; what is left after it."""
        while content and self._medium.fault == "trickling":
            target.sendall(content[:1])
            content = content[1:]
            self._wait(TRICKLE_S)
        return content

    def _wait(self, seconds: float) -> None:
        fault = self._medium.fault
        with self._medium.changed:
            self._medium.changed.wait_for(lambda: self._medium.fault != fault, seconds)

    def _ended(self) -> None:
        with self._medium.changed:
            self.num_ended += 1
            if self.num_ended < 2:
                return
            self._medium.links.discard(self)
        self._client.close()
        self._server.close()


class Listener:
    """Takes connections for one target; a killed one refuses them."""

    def __init__(self, medium: Medium, target: tuple[str, int]) -> None:
        self._medium = medium
        self._target = target
        self._socket = listen_on_a_free_port()
        self.port: int = self._socket.getsockname()[1]
        self._start()

    def open(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self._start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _start(self) -> None:
        threading.Thread(target=self._serve, args=(self._socket,), daemon=True).start()

    def _serve(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                try:
                    Link(self._medium, client, self._target)
                except OSError:  # there is no server
                    with contextlib.suppress(OSError):
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()


def main(host: str, targets: list[int]) -> None:
    medium = Medium()
    listeners = [Listener(medium, (host, target)) for target in targets]
    _say(" ".join(str(listener.port) for listener in listeners))
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        if command in ("requests", "links"):
            _say(str(medium.num_requests if command == "requests" else medium.num_links()))
            continue
        fault, before = name.removeprefix("-"), medium.fault
        if fault != "killed" and before == "killed":
            for listener in listeners:
                listener.open()
        elif fault == "killed" and before != "killed":
            for listener in listeners:
                listener.close()
        medium.set(fault)
        _say("done")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], [int(port) for port in sys.argv[2:]])
