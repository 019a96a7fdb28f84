"""What a user writes wrong: one error that names the option and the remedy, and never the password."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from lmcache_core.config import parse_options
from lmcache_core.errors import ConfigError
from lmcache_core.sdk import BackendError
from lmcache_core_conformance.driver import RecordingHost
from lmcache_core_redis import links
from lmcache_core_redis.config import RedisConfig

from .liar import Liar
from .servers import Server, require
from .tiers import backend_of, fresh_namespace
from .users import Certificates, make_certificates

SECRET = "hunter"
URL = "redis://127.0.0.1:6379"
MISTAKES: dict[str, dict[str, object]] = {
    # the option that the message names: options with which it is wrong, one after another
    "url": {
        f"redis://kv:{SECRET}2@host": {},
        f"redis://kv:{SECRET}℀2@host": {},
        f"redis://[kv:{SECRET}2": {},
        f"redis://:{SECRET}/2@host": {},
        f"redis://kv:{SECRET}#2@host": {},
        f"redis://host?password={SECRET}": {},
        f"{SECRET}@host:6379": {},
        "redis://": {},
        "redis://host:0": {},
        "redis://host:99999": {},
        "redis://host:port": {},
        "redis://host/-1": {},
        "redis://one,two": {},
        "unix://relative": {},
        "redis://with-ca": {"tls_ca": "ca.pem"},
        "redis://host/1": {"cluster": True},
        "unix:///path": {"cluster": True},
    },
    "namespace": {
        URL: {"namespace": "a b"},
        URL + "/0": {"namespace": ""},
        URL + "/1": {"namespace": "a:{b}"},
    },
    "username": {URL: {"username": "kv"}},
    "ttl": {URL: {"ttl": 0}, URL + "/0": {"ttl": "5ms"}},
    "piece_bytes": {
        URL: {"piece_bytes": 100_001},
        URL + "/0": {"piece_bytes": 4096},
        URL + "/1": {"piece_bytes": 0},
    },
    "pin": {URL: {"pin": True}, URL + "/0": {"pin": True, "ttl": "1h", "cluster": True}},
    "cluster": {URL: {"cluster": True, "sentinel": "group"}},
    "sentinel_password": {URL: {"sentinel_password": SECRET}},
    "tls_cert": {"rediss://host": {"tls_cert": "cert.pem"}},
}


@pytest.mark.parametrize(
    ("option", "url"), [(option, url) for option, urls in MISTAKES.items() for url in urls]
)
def test_a_mistake_is_told_by_the_name_of_its_option(option: str, url: str) -> None:
    others = MISTAKES[option][url]
    assert isinstance(others, Mapping)
    with pytest.raises(ConfigError) as caught:
        parse_options(RedisConfig, {"url": url, **others}, "options")
    assert str(caught.value).startswith(f"options.{option}: ")
    assert SECRET not in str(caught.value)


def test_servers_that_are_something_else_are_told_with_what_to_change(tmp_path: Path) -> None:
    server = Server(require("redis"))
    server.start()
    certificates = make_certificates(tmp_path)
    place = f"127.0.0.1:{server.port}"
    (tmp_path / "no-certificate").write_text("of anybody")
    for options, remedy in (
        ({"url": f"redis://{place}", "sentinel": "group"}, "is no Sentinel: leave `sentinel` out"),
        ({"url": f"redis://{place}", "cluster": True}, "is no cluster: leave `cluster` out"),
        ({"url": f"redis://{place}", "password": SECRET}, "leave `password` out"),
        ({"url": f"redis://{place}/77"}, "DB index is out of range"),
        ({"url": f"rediss://{place}"}, "does the server speak TLS?"),
        (
            {"url": f"rediss://{place}", "tls_ca": str(tmp_path / "missing.pem")},
            "tls_ca: .*missing.pem can't be used: No such file",
        ),
        ({"url": f"rediss://{place}", "tls_ca": str(tmp_path / "no-certificate")}, "tls_ca: "),
        ({"url": f"rediss://{place}"} | with_a_passphrase(certificates), "tls_key .*no passphrase"),
        ({"url": f"redis://a..b:{server.port}"}, "not the name of a host"),
    ):
        with pytest.raises(BackendError, match=remedy) as caught:
            open_and_close(options)
        assert SECRET not in str(caught.value)
    server.kill()
    tls = Server(
        require("redis"),
        port=server.port,
        settings={
            "port": 0,
            "tls-port": server.port,
            "tls-cert-file": certificates.server,
            "tls-key-file": certificates.server_key,
            "tls-ca-cert-file": certificates.authority,
            "tls-auth-clients": "no",
        },
    )
    tls.start()
    open_and_close({"url": f"rediss://{place}", "tls_ca": str(certificates.authority)})
    with pytest.raises(BackendError, match="certificate verify failed"):
        open_and_close({"url": f"rediss://{place}"})
    tls.kill()


@pytest.mark.parametrize("fits", [True, False], ids=["zero copy", "redis-py as it comes"])
def test_a_server_that_repeats_what_it_does_not_know_gives_no_password_away(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(require("redis"), settings={"rename-command AUTH": '""'})
    server.start()
    if not fits:
        monkeypatch.setattr(links, "DirectLink", None)
    url = f"redis://127.0.0.1:{server.port}"
    for password in (SECRET, SECRET * 40):
        with pytest.raises(BackendError, match="unknown command") as caught:
            open_and_close({"url": url, "username": "kv", "password": password})
        assert SECRET not in str(caught.value)
    server.kill()


def test_an_address_that_swallows_packets_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Liar()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as queue:
        for _ in range(2):  # so much waits there; what comes after is not answered
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
            for port in (deaf.getsockname()[1], liar.port)
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
        open_and_close({"url": "redis://of-two-addresses"})
    liar.close()


def with_a_passphrase(certificates: Certificates) -> dict[str, object]:
    key = serialization.load_pem_private_key(certificates.client_key.read_bytes(), None)
    locked = certificates.client_key.with_name("locked.pem")
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(SECRET.encode()),
        )
    )
    return {"tls_cert": str(certificates.client), "tls_key": str(locked)}


def open_and_close(options: Mapping[str, object]) -> None:
    """Without the core, whose own deadline might come first on a busy machine."""
    backend = backend_of({**options, "namespace": fresh_namespace()})
    try:
        backend.open(RecordingHost(capacity_bytes=None, deadline_s=1.5, max_in_flight=1))
    finally:
        backend.close()
