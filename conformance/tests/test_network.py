"""The proxy that a harness takes from `lmcache_core_conformance.network` does what it says to connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from conformance_backends.small_server import ENOUGH_S, NBYTES, SILENT_S, Client, get_once, serving
from lmcache_core_conformance import Fault, Unproven
from lmcache_core_conformance.network import Proxy, ServerProcess, free_ports

FELT = {
    "stalled": TimeoutError,
    "partitioned": TimeoutError,
    "reset": ConnectionResetError,
    "half-closed": EOFError,
    "killed": ConnectionError,
}


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
