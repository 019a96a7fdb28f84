"""What may be wrong with a server that runs: contexts in which it is so, and by which it passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from lmcache_core_conformance.network import free_ports

from .sites import Site, wait_until
from .users import KEYS, TIER, TIER_PASSWORD

SOON_S = 10.0
SETTINGS: dict[str, object] = {
    "save": "3600 1000000",  # never, and yet `cannot_save` stops writes
    "busy-reply-threshold": 50,
    "repl-timeout": 1,
}
"""What the server of these conditions needs in its configuration."""


@contextmanager
def a_read_only_replica(site: Site) -> Iterator[None]:
    with _following_nobody(site):
        yield


@contextmanager
def a_replica_without_its_primary(site: Site) -> Iterator[None]:
    site.configure(replica_serve_stale_data="no")
    try:
        with _following_nobody(site):
            yield
    finally:
        site.configure(replica_serve_stale_data="yes")


@contextmanager
def too_few_replicas(site: Site) -> Iterator[None]:
    site.configure(min_replicas_to_write=1)
    try:
        yield
    finally:
        site.configure(min_replicas_to_write=0)


@contextmanager
def a_disk_that_takes_no_snapshot(site: Site) -> Iterator[None]:
    snapshot = site.servers[0].folder / "dump.rdb"
    snapshot.unlink(missing_ok=True)
    snapshot.mkdir()  # what the server can't rename a file to
    _save(site, "err")
    try:
        yield
    finally:
        snapshot.rmdir()
        _save(site, "ok")


@contextmanager
def a_script_that_does_not_end(site: Site) -> Iterator[None]:
    client = site.servers[0].client()
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(redis.ResponseError):  # it is killed
            client.eval("while true do end", 0)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    wait_until(lambda: _answer(site.nodes[0]).startswith("BUSY"), SOON_S)
    try:
        yield
    finally:
        site.nodes[0].script_kill()
        assert ended.wait(SOON_S)


@contextmanager
def no_room(site: Site) -> Iterator[None]:
    with site.full():
        yield


@contextmanager
def no_right_to_write(site: Site) -> Iterator[None]:
    with site.read_only():
        yield


@contextmanager
def a_user_that_is_locked_out(site: Site) -> Iterator[None]:
    _set_user(site, "off")
    try:
        yield
    finally:
        _set_user(site, "on")


@contextmanager
def another_password(site: Site) -> Iterator[None]:
    _set_user(site, "resetpass", ">another")
    try:
        yield
    finally:
        _set_user(site, "resetpass", f">{TIER_PASSWORD}")


@contextmanager
def no_user_of_that_name(site: Site) -> Iterator[None]:
    _end_connections(site)
    site.nodes[0].execute_command("ACL", "DELUSER", TIER)
    try:
        yield
    finally:
        _set_user(site, "on", f">{TIER_PASSWORD}", KEYS, *site.rule)


@contextmanager
def no_connection_to_spare(site: Site) -> Iterator[None]:
    node = site.nodes[0]
    node.ping()
    _end_connections(site)
    node.config_set("maxclients", 1)
    try:
        yield
    finally:
        node.config_set("maxclients", 1000)


@contextmanager
def loading(site: Site) -> Iterator[None]:
    """The server starts again and reads what it had saved, slowly."""
    server, node = site.servers[0], site.nodes[0]
    node.mset({f"filling-{number}": number for number in range(20_000)})
    node.save()
    with site.proxy.faulty("killed"):
        server.kill()
        server.start("--key-load-delay", "200", "--loading-process-events-interval-bytes", "1024", wait=False)
        wait_until(lambda: _answer(node).startswith("LOADING"), SOON_S)
    try:
        yield
    finally:
        node.config_set("key-load-delay", 0)
        wait_until(lambda: _answer(node) == "PONG", SOON_S)


@contextmanager
def _following_nobody(site: Site) -> Iterator[None]:
    site.nodes[0].replicaof("127.0.0.1", free_ports(1)[0])
    try:
        yield
    finally:
        site.nodes[0].replicaof("NO", "ONE")


def _save(site: Site, due: str) -> None:
    site.nodes[0].bgsave()

    def done() -> bool:
        told = site.nodes[0].info("persistence")
        return not told["rdb_bgsave_in_progress"] and told["rdb_last_bgsave_status"] == due

    wait_until(done, SOON_S)


def _set_user(site: Site, *rules: str) -> None:
    site.nodes[0].execute_command("ACL", "SETUSER", TIER, *rules)
    _end_connections(site)


def _end_connections(site: Site) -> None:
    """Ends those of the tier, and returns when it can know."""
    site.nodes[0].execute_command("CLIENT", "KILL", "USER", TIER)
    wait_until(lambda: not site.proxy.num_links, SOON_S)


def _answer(node: redis.Redis) -> str:
    """What a ping gives: PONG, an error, or nothing yet."""
    try:
        return "PONG" if node.ping() else ""
    except redis.ConnectionError as error:  # LOADING is one in redis-py
        return "LOADING" if isinstance(error, redis.BusyLoadingError) else ""
    except redis.ResponseError as error:
        return str(error) if str(error).startswith("BUSY") else f"BUSY? {error}"
