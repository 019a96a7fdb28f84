"""The server process of `lmcache_core_conformance.network`: started, killed, frozen, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance_backends.small_server import ENOUGH_S, NBYTES, SERVER, SILENT_S, get_once, serving
from lmcache_core_conformance.network import Proxy, ServerProcess, free_ports


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def server(port: int) -> Iterator[ServerProcess]:
    server = serving(port)
    server.start()
    yield server
    server.kill()


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


def test_a_forked_child_leaves_its_parents_server_and_proxy_alone(server: ServerProcess, port: int) -> None:
    proxy = Proxy([port])
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            server.kill()
            proxy.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert get_once(proxy.port) == NBYTES
    proxy.close()


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
