"""vLLM: the scheduler's lookups over the caches of several ranks, through real sockets."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.connectors.vllm import wire
from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.ranks import RankAddress, RankLookups
from lmcache_core.connectors.vllm.server import LookupServer
from lmcache_core.engine import CacheEngine
from lmcache_core.identity import Content, ModelRecord, Part

CHUNK = 64
MODEL = ModelRecord(weights="w", config={}, chunk_tokens=CHUNK)
PROMPT = list(range(250))


class Blocks:
    def gather(self, first_token: int, num_tokens: int, payload: Any) -> None:
        for segment in payload:
            segment[:] = bytes(len(segment))


def alone(engine: CacheEngine) -> GroupedCache:
    return GroupedCache([Group(16)], [engine])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """Two ranks' engines, their servers, and the scheduler that asks them."""

    def __init__(self, stack: ExitStack) -> None:
        config = {"chunk_tokens": CHUNK, "tiers": [{"name": "cpu", "backend": "cpu", "capacity": "1MiB"}]}
        self.clock = Clock()
        self.engines = [
            stack.enter_context(
                CacheEngine(
                    config,
                    model=MODEL,
                    part=Part(layers=(0, 1), heads=(rank, rank + 1), content_format="test", content_nbytes=8),
                )
            )
            for rank in range(2)
        ]
        self.servers = [LookupServer(alone(engine)) for engine in self.engines]
        self.addresses = [
            RankAddress(server.path, server.nonce, MODEL.to_json(), {"cpu": "memory"}, has_far_tiers=False)
            for server in self.servers
        ]
        self.lookups = RankLookups(self.addresses, clock=self.clock)
        for server in self.servers:
            stack.callback(server.close)
        stack.callback(self.lookups.close)

    def keep(self, rank: int, num_tokens: int) -> None:
        engine = self.engines[rank]
        engine.store(engine.content(PROMPT[:num_tokens]), Blocks())

    def pins(self) -> list[int]:
        return [len(engine._chain.pins.active()) for engine in self.engines]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


def content(num_tokens: int = len(PROMPT)) -> Content:
    made = Content(MODEL)
    made.extend(PROMPT[:num_tokens])
    return made


def test_a_prefix_counts_as_far_as_every_rank_has_it(ranks: Ranks) -> None:
    ranks.keep(0, 192)
    ranks.keep(1, 128)
    held = ranks.lookups.hold(content(), 1000)
    assert held.num_tokens == 128
    assert ranks.pins() == [1, 1]
    ranks.lookups.release(held)
    assert ranks.pins() == [0, 0]


def test_a_tail_counts_if_every_rank_has_the_same_one(ranks: Ranks) -> None:
    ranks.keep(0, 240)
    ranks.keep(1, 240)
    assert ranks.lookups.hold(content(), 1000).num_tokens == 240
    assert ranks.lookups.hold(content(), 200).num_tokens == 192


def test_a_tail_of_one_rank_is_cut_back_to_whole_chunks(ranks: Ranks) -> None:
    ranks.keep(0, 240)
    ranks.keep(1, 208)
    assert ranks.lookups.hold(content(), 1000).num_tokens == 192


def test_a_rank_that_is_gone_makes_it_a_miss_for_all_and_leaves_no_pins(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.keep(0, 192)
    ranks.keep(1, 192)
    ranks.servers[1].close()
    assert ranks.lookups.hold(content(), 1000).num_tokens == 0
    assert ranks.pins() == [0, 0]
    assert "rank 1 doesn't answer" in caplog.text


def test_a_rank_that_hangs_costs_its_deadline_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.keep(0, 192)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "rank"))
        silent.listen()
        hung = RankAddress(
            str(tmp_path / "rank"), b"n" * 16, MODEL.to_json(), {"cpu": "memory"}, has_far_tiers=False
        )
        lookups = RankLookups([ranks.addresses[0], hung], clock=ranks.clock)
        assert lookups.hold(content(), 1000).num_tokens == 0
        silent.accept()[0].close()  # the one connection there was
        silent.setblocking(False)
        assert lookups.hold(content(), 1000).num_tokens == 0
        with pytest.raises(BlockingIOError):
            silent.accept()  # not asked again while it cools down
        ranks.clock.now = 6.0
        assert lookups.hold(content(), 1000).num_tokens == 0
        silent.accept()[0].close()
        lookups.close()
    assert ranks.pins() == [0, 0]


def test_who_does_not_know_the_nonce_is_not_answered(ranks: Ranks) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(ranks.servers[0].path)
        stranger.sendall(os.urandom(16))
        stranger.settimeout(10)
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("message", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b"\x01\0\0\0\xc1"])
def test_what_cannot_be_understood_ends_the_connection_and_no_other(ranks: Ranks, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hostile:
        hostile.connect(ranks.servers[0].path)
        hostile.sendall(ranks.servers[0].nonce + message)
        hostile.settimeout(10)
        assert hostile.recv(1) == b""
    ranks.keep(0, 128)
    ranks.keep(1, 128)
    assert ranks.lookups.hold(content(), 1000).num_tokens == 128


def test_only_this_user_reaches_the_socket_and_nothing_of_it_stays(ranks: Ranks) -> None:
    path = Path(ranks.servers[0].path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    ranks.servers[0].close()
    assert not path.parent.exists()


def test_a_killed_worker_s_socket_is_removed_by_the_next_one(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, starting = tmp_path / "lmcache-core-rank-killed", tmp_path / "lmcache-core-rank-starting"
    for folder in (left, starting):
        folder.mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unheard:
            unheard.bind(str(folder / "rank"))
    first = LookupServer(alone(ranks.engines[0]))
    for folder in (left, Path(first.path).parent):
        os.utime(folder, (0, 0))
    second = LookupServer(alone(ranks.engines[1]))
    assert not left.exists()
    assert starting.exists(), "that one may not listen yet"
    assert Path(first.path).exists(), "that one is still served"
    first.close()
    second.close()


def test_an_arrival_ends_when_every_rank_is_done(ranks: Ranks) -> None:
    ranks.keep(0, 192)
    ranks.keep(1, 192)
    arrival = ranks.lookups.bring_near(content())
    for _ in range(1000):
        if arrival.done:
            break
        arrival.wait(0.01)
    assert arrival.done
    assert arrival.sources == [("cpu", CHUNK)] * 3


def test_an_arrival_does_not_wait_for_a_rank_that_is_gone(ranks: Ranks) -> None:
    arrival = ranks.lookups.bring_near(content())
    for server in ranks.servers:
        server.close()
    assert arrival.done


def test_an_unknown_lookup_is_forgiven(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    answers = ranks.lookups.ask([wire.Release(["unknown"]), None], bool)
    assert answers == [True, None]
    assert "gone before its end" in caplog.text


def test_a_folder_for_temporary_files_too_deep_for_a_socket_is_not_used(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    server = LookupServer(alone(ranks.engines[0]))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(server.path)
    finally:
        server.close()
    assert not list(deep.iterdir())
