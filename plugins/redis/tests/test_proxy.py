"""The proxy of these tests does to a stock client what its faults say."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .proxies import Proxy
from .servers import Server, require

VALUE = b"v" * (64 << 10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(require("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def proxy(server: Server) -> Proxy:
    return Proxy([server.port])


@pytest.fixture
def client(proxy: Proxy) -> Iterator[redis.Redis]:
    with redis.Redis(port=proxy.ports[0], socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
        client.set("key", VALUE)
        yield client


@pytest.mark.parametrize(
    ("fault", "due"),
    [
        ("stalled", redis.TimeoutError),
        ("partitioned", redis.TimeoutError),
        ("trickling", None),
        ("reset", redis.ConnectionError),
        ("half-closed", redis.ConnectionError),
        ("killed", redis.ConnectionError),
    ],
)
def test_a_fault_is_felt_and_passes(
    proxy: Proxy, client: redis.Redis, fault: str, due: type[Exception] | None
) -> None:
    with proxy.faulty(fault):
        if due is None:
            assert 0 < received_in(0.3, proxy.ports[0]) < len(VALUE)
        else:
            with pytest.raises(due):
                client.get("key")
    assert client.get("key") == VALUE


@pytest.mark.parametrize("fault", ["reset", "half-closed"])
def test_a_value_is_cut_on_its_way_in_too(proxy: Proxy, client: redis.Redis, fault: str) -> None:
    with proxy.faulty(fault), pytest.raises(redis.ConnectionError):
        client.set("key", b"w" * len(VALUE))
    assert client.get("key") == VALUE


def test_a_killed_server_refuses_connections(proxy: Proxy) -> None:
    with proxy.faulty("killed"), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.ports[0]))


def test_requests_are_counted_and_a_cut_connection_carries_one(proxy: Proxy, client: redis.Redis) -> None:
    before = proxy.num_requests
    for _ in range(3):
        client.get("key")
    assert proxy.num_requests - before == 3
    with proxy.faulty("reset"):
        before = proxy.num_requests
        with pytest.raises(redis.ConnectionError):
            client.set("key", VALUE)
        assert proxy.num_requests - before == 1


def received_in(seconds: float, port: int) -> int:
    """How many bytes of the answer come within this time."""
    until, received = time.monotonic() + seconds, 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET key\r\n")
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            with contextlib.suppress(TimeoutError):
                received += len(connection.recv(1 << 16))
    return received
