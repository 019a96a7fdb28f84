"""What a harness takes from `lmcache_core_conformance.network` does what it says to real connections."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core_conformance import Fault, Unproven
from lmcache_core_conformance.network import Proxy, ServerProcess, free_ports

NBYTES = 64 << 10
ENOUGH_S, SILENT_S = 60.0, 0.5
SERVER = """
import socketserver, sys

class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            what, nbytes = line.split()
            if what == b"put":
                self.rfile.read(int(nbytes))
            self.wfile.write(b"v" * int(nbytes) if what == b"get" else b"k")

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", *sys.argv[2:], flush=True)
server.serve_forever()
"""
FELT = {
    "stalled": TimeoutError,
    "partitioned": TimeoutError,
    "reset": ConnectionResetError,
    "half-closed": EOFError,
    "killed": ConnectionError,
}


class Client:
    """One connection, made when it is first needed and after a failure, as a driver keeps it."""

    def __init__(self, port: int) -> None:
        self.timeout_s = ENOUGH_S
        self._port = port
        self._socket: socket.socket | None = None

    def get(self) -> int:
        """How many bytes came. Raises what stopped them."""
        return self._ask(b"get %d\n" % NBYTES, NBYTES)

    def put(self) -> int:
        return self._ask(b"put %d\n" % NBYTES + b"v" * NBYTES, 1)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, request: bytes, due: int) -> int:
        received = 0
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), ENOUGH_S)
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(request)
            while received < due:
                piece = self._socket.recv(due - received)
                if not piece:
                    raise EOFError(f"after {received} bytes")
                received += len(piece)
        except (OSError, EOFError):
            self.close()
            raise
        return received


def get_once(port: int, timeout_s: float = ENOUGH_S) -> int:
    with contextlib.closing(Client(port)) as client:
        client.timeout_s = timeout_s
        return client.get()


def serving(port: int, ready: str | int = "serving") -> ServerProcess:
    command = [sys.executable, "-I", "-c", SERVER, str(port)]
    return ServerProcess(command, ready=ready, ready_within_s=ENOUGH_S)


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def server(port: int) -> Iterator[ServerProcess]:
    server = serving(port)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, port: int) -> Iterator[Proxy]:
    proxy = Proxy([port])
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    client = Client(proxy.port)
    assert client.get() == NBYTES
    yield client
    client.close()


# --- the proxy


@pytest.mark.parametrize("fault", FELT)
def test_a_fault_is_felt_by_a_connection_that_was_there_and_passes(
    proxy: Proxy, client: Client, fault: str
) -> None:
    client.timeout_s = SILENT_S if FELT[fault] is TimeoutError else ENOUGH_S
    with proxy.faulty(fault), pytest.raises(FELT[fault]):
        client.get()
    client.timeout_s = ENOUGH_S
    with contextlib.suppress(ConnectionError):  # the connection may have been broken when the fault passed
        client.get()
    assert client.get() == NBYTES


def test_nothing_passes_once_the_proxy_says_it_is_killed(proxy: Proxy) -> None:
    for _ in range(100):  # the threads that hand on what comes have yet to wake
        with contextlib.closing(Client(proxy.port)) as client:
            assert client.get() == NBYTES
            with proxy.faulty("killed"), pytest.raises(ConnectionError):
                client.get()


@pytest.mark.parametrize("fault", FELT)
def test_a_fault_is_felt_by_a_new_connection(proxy: Proxy, fault: str) -> None:
    with proxy.faulty(fault), pytest.raises(FELT[fault]):
        get_once(proxy.port, SILENT_S if FELT[fault] is TimeoutError else ENOUGH_S)
    assert get_once(proxy.port) == NBYTES


@pytest.mark.parametrize("fault", ["reset", "half-closed"])
def test_a_value_is_cut_on_its_way_in_too(proxy: Proxy, client: Client, fault: str) -> None:
    with proxy.faulty(fault), pytest.raises(FELT[fault]):
        client.put()
    assert client.put() == 1


def test_a_trickling_value_comes_a_few_bytes_at_a_time(proxy: Proxy) -> None:
    with (
        proxy.faulty("trickling"),
        socket.create_connection(("127.0.0.1", proxy.port), ENOUGH_S) as connection,
    ):
        connection.sendall(b"get %d\n" % NBYTES)
        pieces = [len(connection.recv(NBYTES)) for _ in range(3)]
    assert all(pieces)
    assert sum(pieces) < 1000


def test_a_delayed_answer_comes_late_and_whole(proxy: Proxy, client: Client) -> None:
    with proxy.faulty("delayed"):
        began = time.monotonic()
        assert client.get() == NBYTES
        assert time.monotonic() - began >= 0.05  # the fault itself: no machine is too slow for that


def test_while_it_is_killed_connections_are_refused(proxy: Proxy) -> None:
    with proxy.faulty(Fault.KILLED), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))


def test_faults_of_the_suite_are_known_by_their_names(proxy: Proxy, client: Client) -> None:
    with proxy.faulty(Fault.RESET), pytest.raises(ConnectionResetError):
        client.get()


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.READ_ONLY])
def test_what_no_network_can_have_is_unproven(proxy: Proxy, fault: Fault) -> None:
    with pytest.raises(Unproven, match=fault.value), proxy.faulty(fault):
        pass


def test_a_misspelt_fault_is_an_error_that_names_those_there_are(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match=r"'stall' is no fault.*stalled"), proxy.faulty("stall"):  # type: ignore[arg-type]
        pass


def test_requests_are_counted_and_a_cut_connection_carries_one(proxy: Proxy, client: Client) -> None:
    before = proxy.num_requests
    for _ in range(3):
        client.get()
    assert proxy.num_requests - before == 3
    with proxy.faulty("reset"):
        before = proxy.num_requests
        with pytest.raises(ConnectionResetError):
            client.put()
        assert proxy.num_requests - before == 1


def test_open_connections_are_counted(server: ServerProcess, port: int) -> None:
    proxy = Proxy([port])  # of others' connections it may not have seen the end yet
    with contextlib.closing(Client(proxy.port)) as one, contextlib.closing(Client(proxy.port)) as other:
        one.get()
        other.get()
        assert proxy.num_links == 2
        other.close()
        while proxy.num_links != 1:  # until both directions have seen the end
            pass
    proxy.close()


def test_each_target_has_a_port_of_its_own(server: ServerProcess, port: int) -> None:
    absent = free_ports(1)[0]
    proxy = Proxy([absent, port])
    assert get_once(proxy.ports[1]) == NBYTES
    with pytest.raises(ConnectionResetError):
        get_once(proxy.ports[0])
    proxy.close()


def test_a_proxy_that_was_closed_refuses_connections_and_commands(server: ServerProcess, port: int) -> None:
    proxy = Proxy([port])
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))
    with pytest.raises(RuntimeError, match="has ended"):
        _ = proxy.num_requests


# --- the server's process


@pytest.mark.parametrize("by", ["what it prints", "its port"])
def test_a_started_server_serves_at_once_and_a_killed_one_refuses(by: str) -> None:
    [port] = free_ports(1)
    server = serving(port, "serving" if by == "what it prints" else port)
    for _ in range(2):
        server.start()
        assert get_once(port) == NBYTES
        server.kill()
        with pytest.raises(ConnectionRefusedError):
            get_once(port)


def test_while_killed_it_is_gone_and_then_it_is_back_on_its_port(server: ServerProcess, port: int) -> None:
    with server.killed(), pytest.raises(ConnectionRefusedError):
        get_once(port)
    assert get_once(port) == NBYTES


def test_while_frozen_connections_are_taken_and_nothing_is_answered(server: ServerProcess, port: int) -> None:
    with server.frozen(), pytest.raises(TimeoutError):
        get_once(port, SILENT_S)
    assert get_once(port) == NBYTES


def test_what_it_prints_is_kept_over_its_lives() -> None:
    server = serving(free_ports(1)[0])
    server.start("the first time")
    server.kill()
    server.start("again")
    server.kill()
    assert server.output == "serving the first time\nserving again\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["no-such-server-binary"], "ended with 1.*no-such-server-binary: No such file"),
        ([sys.executable, "-c", "print('no licence')"], "ended with 0.*no licence"),
        ([sys.executable, "-c", "input()"], "ended with 1.*EOFError"),  # it has no input to wait for
    ],
    ids=["no program", "ends", "asks"],
)
@pytest.mark.parametrize("ready", ["serving", 0], ids=["line", "port"])
def test_a_server_that_does_not_start_is_an_error_with_its_words(
    command: list[str], told: str, ready: str | int
) -> None:
    server = ServerProcess(command, ready=ready or free_ports(1)[0], ready_within_s=ENOUGH_S)
    with pytest.raises(RuntimeError, match=f"(?s){told}"):
        server.start()
    assert server.pid == 0


@pytest.mark.parametrize("ready", ["serving", 0], ids=["line", "port"])
def test_a_server_that_never_serves_is_an_error_and_is_killed(ready: str | int) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    server = ServerProcess(command, ready=ready or free_ports(1)[0], ready_within_s=SILENT_S)
    with pytest.raises(RuntimeError, match=r"does not serve after 0\.5 s"):
        server.start()
    assert server.pid == 0


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ServerProcess([sys.executable], ready="", directory=tmp_path / "absent").start()


def test_a_running_server_is_not_started_twice(server: ServerProcess) -> None:
    with pytest.raises(RuntimeError, match="started already"):
        server.start()


def test_what_was_not_started_can_be_killed_but_not_frozen() -> None:
    server = serving(free_ports(1)[0])
    server.kill()
    with pytest.raises(RuntimeError, match="not started"), server.frozen():
        pass


def test_a_server_outlives_the_thread_that_started_it(server: ServerProcess) -> None:
    [port] = free_ports(1)
    other = serving(port)
    thread = threading.Thread(target=other.start)
    thread.start()
    thread.join()
    assert get_once(port) == NBYTES
    other.kill()


def test_its_children_are_killed_with_it() -> None:
    """A script that starts the server, and a server that has workers."""
    script = f"{sys.executable} -c 'import os, signal; print(os.getpid(), flush=True); signal.pause()' & wait"
    server = ServerProcess(["/bin/sh", "-c", script], ready="\n")
    server.start()
    child = int(server.output)
    server.kill()
    assert is_gone(child)


def test_a_forked_child_leaves_its_parents_server_and_proxy_alone(
    server: ServerProcess, proxy: Proxy, client: Client
) -> None:
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            server.kill()
            proxy.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert client.get() == NBYTES


ENDS = {
    "by itself": "",
    "by an error": "raise SystemExit(3)",
    "by SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "by Ctrl-C": "os.killpg(os.getpid(), signal.SIGINT); signal.pause()",
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_behind_however_the_process_of_the_tests_ends(end: str) -> None:
    program = f"""
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background has it ignored
from lmcache_core_conformance.network import Proxy, ServerProcess, free_ports
[port] = free_ports(1)
server = ServerProcess([sys.executable, "-I", "-c", {SERVER!r}, str(port)], ready="serving")
server.start()
proxy = Proxy([port])
print(server.pid, proxy._process.pid, flush=True)
{ENDS[end]}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
        process_group=0,
        check=False,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, or does within a while: the kernel is told to kill it, not asked."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # whoever adopted it hasn't looked
            return True
    os.kill(pid, signal.SIGKILL)
    return False
