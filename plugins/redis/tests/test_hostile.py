"""Replies that no sound server gives: never beyond the views, never past the deadline, never a hit."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from lmcache_core.sdk import BackendUnavailable, DeadlineExceeded, Item, Status, View
from lmcache_core.storage import Operation
from lmcache_core_conformance.values import key_named
from lmcache_core_redis import links
from lmcache_core_redis.deadlines import Within
from lmcache_core_redis.layout import Meta, Names
from lmcache_core_redis.waits import BoundedSocket
from lmcache_core_redis.writing import Writer

from .liar import Answer, Liar, bulk
from .servers import require
from .sites import Site
from .tiers import Tier, fresh_namespace, tier_on

DEADLINE_S = 1.0
NBYTES = 60_000
VERSION = b"v" * 16
MANY_NBYTES = 32 << 20
"""More than anything here should take of this process's memory."""


@pytest.fixture
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.close()


@pytest.fixture
def tier(liar: Liar) -> Iterator[Tier]:
    with tier_on(
        {"url": f"redis://127.0.0.1:{liar.port}", "namespace": fresh_namespace()}, DEADLINE_S
    ) as tier:
        yield tier


def options_of(liar: Liar) -> dict[str, object]:
    return {"url": f"redis://127.0.0.1:{liar.port}", "namespace": fresh_namespace()}


def described(nbytes: int, piece_nbytes: int, piece: bytes) -> Answer:
    """A description, and something under every other field."""
    num_pieces = min(-(-nbytes // piece_nbytes), (1 << 32) - 1)
    meta = struct.pack("<B16sQII", 1, VERSION, nbytes, piece_nbytes, num_pieces)

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"HLEN":
            return b":%d\r\n" % (num_pieces + 1)
        if command[0] == b"HMGET":
            return b"*%d\r\n" % len(command[2:]) + bulk(meta) + piece * len(command[3:])
        return bulk(meta) if command[2] == b"m" else piece

    return answer


def always(reply: bytes) -> Answer:
    return lambda command: reply


MISSES: dict[str, Answer] = {
    "a description that is far too long": always(bulk(b"?" * 17_000_000)),
    "pieces of one byte": described(NBYTES, 1, bulk(VERSION + b"x")),
    "more bytes than there are": described(1 << 63, 1 << 31, bulk(VERSION + b"x")),
    "a piece that is too long": described(NBYTES, 1 << 16, bulk(VERSION + b"x" * 70_000)),
    "a piece that is too short": described(NBYTES, 1 << 16, bulk(VERSION + b"x" * 10)),
    "a piece that is empty": described(NBYTES, 1 << 16, bulk(b"")),
    "no piece": described(NBYTES, 1 << 16, b"$-1\r\n"),
    "a piece of another put": described(NBYTES, 1 << 16, bulk(b"w" * 16 + b"x" * NBYTES)),
    "another type": always(b"-WRONGTYPE Operation against a key\r\n"),
}
FAILURES: dict[str, Answer] = {
    "a terabyte is announced": described(NBYTES, 1 << 16, b"$1099511627776\r\nxxx"),
    "a gigabyte is announced": described(NBYTES, 1 << 16, b"$1073741824\r\nxxx"),
    "a million replies are announced": always(b"*1048576\r\n"),
    "a string longer than it said": always(b"$3\r\nabcdef\r\n"),
    "a line without end": always(b"+" + b"x" * 100_000),
    "arrays in arrays": always(b"*1\r\n" * 5000 + b":1\r\n"),
    "an array as a piece": described(NBYTES, 1 << 16, b"*1\r\n" * 5000 + b":1\r\n"),
    "a push of RESP3": always(b">2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    "a null of RESP3": always(b"_\r\n"),
    "an empty error": always(b"-\r\n"),
    "an error that is no text": always(b"-\xff\xfe\r\n"),
    "an empty line": always(b"\r\n"),
    "a port there can't be": always(b"-MOVED 1 127.0.0.1:99999\r\n"),
    "a host there can't be": always(b"-MOVED 1 a..b:6379\r\n"),
}


@pytest.mark.parametrize("name", [*MISSES, *FAILURES])
def test_a_reply_that_is_wrong_is_no_hit_and_takes_no_memory(
    liar: Liar, tier: Tier, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    liar.answer = (MISSES | FAILURES)[name]
    with caplog.at_level(logging.WARNING):
        tracemalloc.start()
        try:
            outcome, _ = tier.get("value", (NBYTES - 4096,))
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    if name in MISSES:
        assert outcome.status is Status.MISS, outcome
    else:
        assert outcome.status in (Status.FAILED, Status.TIMEOUT), outcome
        assert outcome.error is None or outcome.error.__cause__ is None, "it isn't one of ours"
    assert not caplog.records, "nothing is wrong with redis-py"
    assert taken < MANY_NBYTES
    liar.answer = always(b"$-1\r\n")
    assert any(tier.get("value")[0].status is Status.MISS for _ in range(3)), "it heals"


def slots(first: int, last: int, host: bytes, port: int) -> bytes:
    return b"*1\r\n*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, bulk(host), port)


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        ({"cluster": True}, slots(0, 1 << 60, b"127.0.0.1", 1)),
        ({"cluster": True}, slots(-5, -1, b"127.0.0.1", 1)),
        ({"cluster": True}, slots(0, 16383, b"127.0.0.1", 99_999)),
        ({"cluster": True}, slots(0, 16383, b"\xff\xfe", 1)),
        ({"cluster": True}, slots(0, 16383, b"a" * 300, 1)),
        ({"cluster": True}, b":5\r\n"),
        ({"sentinel": "group"}, b"*2\r\n" + bulk(b"127.0.0.1") + bulk(b"port")),
        ({"sentinel": "group"}, b"*2\r\n" + bulk(b"\xff\xfe") + bulk(b"1")),
        ({"sentinel": "group"}, b"*-1\r\n"),
    ],
)
def test_a_map_that_leads_nowhere_is_told_as_such(
    liar: Liar, options: dict[str, object], reply: bytes
) -> None:
    liar.answer = always(reply)
    with pytest.raises(BackendUnavailable), tier_on({**options_of(liar), **options}, DEADLINE_S):
        pass


def test_a_redis_py_that_does_not_fit_is_held_to_the_deadline_too(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(*arguments: object) -> None:
        raise AttributeError("redis-py has no such thing any more")

    monkeypatch.setattr(links, "DirectLink", unfit)
    liar.answer = always(b"$-1\r\n")
    with tier_on(options_of(liar), DEADLINE_S) as tier:
        liar.answer, liar.pause_s = always(bulk(bytes(200))), 0.05  # 10 s in all
        job = tier.core.submit(Operation.GET, [key_named("value")], view_nbytes=4096)
        assert job.wait_finished(5.0), "the call is still at it"


def test_a_unix_socket_that_drains_slowly_ends_a_send_in_time() -> None:
    """The kernel gives each of its buffers the whole time-out. Drained to its end, this takes 12 s."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ended = threading.Event()

    def drain() -> None:
        while not ended.wait(0.05) and theirs.recv(1 << 14):
            pass

    def send() -> None:
        with contextlib.suppress(DeadlineExceeded):
            bounded.send([memoryview(bytes(4 << 20))])

    with ours, theirs:
        bounded = BoundedSocket(ours)
        bounded.call = Within(0.3)
        threads = [threading.Thread(target=work) for work in (drain, send)]
        for thread in threads:
            thread.start()
        threads[1].join(5.0)
        in_time = not threads[1].is_alive()
        ended.set()
        ours.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    assert in_time


def test_what_is_foreign_in_one_key_costs_the_others_of_a_batch_nothing() -> None:
    site = Site(require("redis"))
    with tier_on(site.options(fresh_namespace())) as tier:
        names = ["value", "long", "list", "bare"]
        assert tier.put("value").status is Status.OK
        site.nodes[0].hset(tier.name_of("long"), mapping={"m": b"x" * 17_000_000, "0": b"y"})
        site.nodes[0].rpush(tier.name_of("list"), "element")
        site.nodes[0].hset(tier.name_of("bare"), "0", b"a piece, not described")
        job = tier.core.run(Operation.STAT, [key_named(name) for name in names])
        assert [job.outcomes[n].status for n in range(4)] == [Status.OK, *[Status.MISS] * 3]
        for name in names:
            assert tier.put(name, 2).status is Status.OK
            assert tier.holds(name, 2)


def test_something_foreign_where_pins_are_kept_is_removed_and_no_value_stays_for_ever() -> None:
    site = Site(require("redis"), {"maxmemory-policy": "volatile-lru"})
    namespace = fresh_namespace()
    site.nodes[0].set(f"{namespace}.pins", "foreign")
    with tier_on({**site.options(namespace), "ttl": "1h", "pin": True}) as tier:
        assert tier.put("value").status is Status.OK, "removed at open"
        site.nodes[0].set(f"{namespace}.pins", "foreign")
        tier.put("value")
        assert 0 < site.nodes[0].ttl(tier.name_of("value")) <= 3600


def test_no_piece_of_a_put_that_a_flush_has_cut_stays_for_ever() -> None:
    site = Site(require("redis"))
    meta = Meta.of(VERSION, 5 << 16, 1 << 16, None)
    key = key_named("value")
    names = Names(fresh_namespace())
    item = Item(key, [View(0, meta.nbytes, memoryview(bytearray(meta.nbytes)))])
    commands = list(Writer(names, 1 << 16, None, keeps_pins=False)._commands(item, names.value(key), meta))
    for cut in range(1, len(commands) - 2):
        site.nodes[0].flushall()
        for command in commands[cut:-1]:
            site.nodes[0].execute_command(*(a if isinstance(a, bytes) else b"".join(a) for a in command))
        assert all(site.nodes[0].ttl(name) > 0 for name in site.nodes[0].scan_iter("*"))
