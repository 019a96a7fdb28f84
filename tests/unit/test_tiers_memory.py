"""The memory tier over the real pool and cpu backend: what leaves when room is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lmcache_core.config import load_config
from lmcache_core.events import EventBus
from lmcache_core.frame import FrameHeader, FrameKind, Segment
from lmcache_core.identity.keys import StorageKey
from lmcache_core.registry import discover
from lmcache_core.tiers import Frame, MemoryTier, TierChain, build_chain

PART = "0" * 16


def key_of(name: str) -> StorageKey:
    return StorageKey(f"c-{PART}-{name}")


def put(chain: TierChain, name: str, nbytes: int, parent: str = "") -> bool:
    header = FrameHeader(
        kind=FrameKind.CHUNK,
        key=key_of(name),
        parent=key_of(parent) if parent else None,
        part=PART,
        content_format="test",
        first_token=0,
        num_tokens=16,
        segments=(Segment(nbytes, nbytes),),
    )
    frame = chain.allocate(header, time.monotonic() + 5.0)
    if frame is None:
        return False
    with frame:
        return chain.put(frame, {})


def chain_of(capacity: str, staging: str = "1MiB") -> TierChain:
    config = load_config(
        {
            "memory": {"staging": staging, "huge_pages": False},
            "tiers": [{"name": "cpu", "backend": "cpu", "capacity": capacity}],
        }
    )
    return build_chain(config, discover(), parts=(PART,), events=EventBus())


@pytest.fixture
def chain() -> Iterator[TierChain]:
    chain = chain_of("4MiB")
    yield chain
    assert chain.pool.stats().leases == 0
    chain.pool.check()
    chain.close(time.monotonic())


def memory(chain: TierChain) -> MemoryTier:
    (tier,) = chain.tiers
    assert isinstance(tier, MemoryTier)
    return tier


def test_two_models_of_different_frame_size_alternate_for_10_000_stores_and_none_is_refused(
    chain: TierChain,
) -> None:
    for i in range(10_000):
        small, chunk = bool(i % 2), (i // 2) % 8
        nbytes = 24_000 if small else 150_000
        name = f"{'s' if small else 'l'}-{i // 16}-{chunk}"
        parent = f"{'s' if small else 'l'}-{i // 16}-{chunk - 1}" if chunk else ""
        assert put(chain, name, nbytes, parent), f"store {i} was refused"
    stats = memory(chain).index.stats()
    assert stats.used_bytes <= 4 << 20
    assert stats.used_bytes > 2 << 20


def test_a_change_of_model_gives_the_new_frame_size_the_whole_pool(chain: TierChain) -> None:
    for i in range(400):
        assert put(chain, f"a-{i}", 20_000)
    for i in range(100):
        assert put(chain, f"b-{i}", 300_000)
    index = memory(chain).index
    sizes = [copy.nbytes for key in index.keys("c-") if (copy := index.get(key)) is not None]
    assert max(sizes) > 300_000
    assert memory(chain).contains(key_of("b-99"))
    assert memory(chain).contains(key_of("b-90"))


def test_leased_frames_are_never_evicted_and_keep_their_bytes(chain: TierChain) -> None:
    put(chain, "kept", 100_000)
    frame = memory(chain).borrow(key_of("kept"), "test")
    assert isinstance(frame, Frame)
    frame.segments()[0][:4] = b"kept"
    for i in range(200):
        assert put(chain, f"x-{i}", 100_000)
    assert bytes(frame.segments()[0][:4]) == b"kept"
    assert memory(chain).contains(key_of("kept"))
    frame.release()


def test_children_leave_before_their_parents(chain: TierChain) -> None:
    for i in range(8):
        put(chain, f"p-{i}", 100_000, f"p-{i - 1}" if i else "")
    memory(chain).index.touch([key_of(f"p-{i}") for i in range(8)])
    for i in range(35):
        put(chain, f"y-{i}", 100_000)
        held = [memory(chain).contains(key_of(f"p-{j}")) for j in range(8)]
        assert held == sorted(held, reverse=True), "a parent left before its child"


def test_a_store_is_refused_while_everything_is_leased_and_works_again_after() -> None:
    chain = chain_of("512KiB", "256KiB")
    frames = []
    for i in range(5):
        put(chain, f"z-{i}", 90_000)
        frame = memory(chain).borrow(key_of(f"z-{i}"), "test")
        assert frame is not None
        frames.append(frame)
    assert not put(chain, "late", 90_000)
    for frame in frames:
        frame.release()
    assert put(chain, "late", 90_000)
    chain.close(time.monotonic())
