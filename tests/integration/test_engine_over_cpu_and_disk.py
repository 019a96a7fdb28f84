"""The engine's verbs over the real cpu and disk backends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cache_scenario import (
    CHUNK,
    OracleKV,
    Recorder,
    config_of,
    cpu,
    disk,
    engine_of,
    prompt,
    retrieve,
    settle,
    store,
)

from lmcache_core.errors import ConfigError, LeaseError
from lmcache_core.events import BroughtNear, ChunkAdmitted, ChunkEvicted, FrameRejected, TierDown
from lmcache_core.identity import StorageKey


def test_a_stored_prompt_comes_back_from_cpu_with_its_tail(tmp_path: Path) -> None:
    tokens = prompt(1, 10 * CHUNK + 23)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        assert store(engine, tokens) == 10 * CHUNK + 16
        assert engine.lookup(tokens).tokens_by_tier == {"cpu": 10 * CHUNK + 16}
        assert retrieve(engine, tokens) == 10 * CHUNK + 16
        settle(engine)


def test_a_new_engine_finds_on_disk_what_the_last_one_stored_and_promotes_it(tmp_path: Path) -> None:
    tokens = prompt(2, 6 * CHUNK)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        store(engine, tokens)
        settle(engine)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        assert engine.lookup(tokens).tokens_by_tier == {"disk": 6 * CHUNK}
        assert retrieve(engine, tokens) == 6 * CHUNK
        assert engine.lookup(tokens).tokens_by_tier == {"cpu": 6 * CHUNK}
        settle(engine)


def test_a_limit_inside_a_tail_leaves_the_tail_out() -> None:
    tokens = prompt(30, 2 * CHUNK + 16)
    with engine_of(config_of(cpu())) as engine:
        store(engine, tokens)
        for limit, want in ((len(tokens), 16), (len(tokens) - 1, 0), (2 * CHUNK, 0)):
            assert engine.lookup(tokens, limit=limit).num_tokens == 2 * CHUNK + want
            assert retrieve(engine, tokens, limit=limit) == 2 * CHUNK + want
        settle(engine)


def test_a_longer_prompt_hits_the_shared_prefix_and_the_tail_that_fits(tmp_path: Path) -> None:
    document = prompt(3, 4 * CHUNK + 16)
    with engine_of(config_of(cpu())) as engine:
        store(engine, document)
        longer = document + prompt(4, 3 * CHUNK)
        assert engine.lookup(longer).num_tokens == 4 * CHUNK + 16
        assert retrieve(engine, longer) == 4 * CHUNK + 16
        settle(engine)


def test_limit_leaves_the_last_token_to_compute() -> None:
    tokens = prompt(5, 4 * CHUNK)
    with engine_of(config_of(cpu())) as engine:
        store(engine, tokens)
        assert retrieve(engine, tokens, limit=len(tokens) - 1) == 3 * CHUNK
        settle(engine)


def test_a_mask_skips_what_the_caller_has() -> None:
    tokens = prompt(6, 5 * CHUNK)
    mask = [False] * (2 * CHUNK) + [True] * (3 * CHUNK)
    with engine_of(config_of(cpu())) as engine:
        kv = OracleKV(tokens)
        assert engine.store(tokens, kv, mask=mask).num_tokens == 3 * CHUNK
        assert kv.gathered[0] == (2 * CHUNK, CHUNK)
        assert engine.lookup(tokens).num_tokens == 0
        engine.store(tokens, kv)
        assert retrieve(engine, tokens, mask=mask) == 3 * CHUNK
        settle(engine)


@pytest.mark.parametrize("mask", [[False] * 5 + [True] * 91, [True, False] * 48, [True] * 95])
def test_a_mask_that_is_not_false_then_true_at_a_chunk_is_refused(mask: list[bool]) -> None:
    with engine_of(config_of(cpu())) as engine, pytest.raises(ValueError, match="mask"):
        engine.store(prompt(7, 3 * CHUNK), OracleKV(prompt(7, 3 * CHUNK)), mask=mask)


def test_known_chunks_are_not_gathered_again() -> None:
    tokens = prompt(8, 4 * CHUNK)
    with engine_of(config_of(cpu())) as engine:
        store(engine, tokens)
        kv = OracleKV(tokens)
        result = engine.store(tokens, kv)
        assert (result.num_tokens, result.num_known_tokens, kv.gathered) == (0, 4 * CHUNK, [])


def test_prompts_with_one_other_token_share_only_the_chunks_before_it() -> None:
    tokens = prompt(9, 4 * CHUNK)
    other = tokens[:]
    other[2 * CHUNK] += 1
    with engine_of(config_of(cpu())) as engine:
        store(engine, tokens)
        assert retrieve(engine, other) == 2 * CHUNK


def test_salts_never_share() -> None:
    tokens = prompt(10, 2 * CHUNK)
    with engine_of(config_of(cpu())) as engine:
        engine.store(engine.content(tokens, salt=b"a"), OracleKV(tokens))
        assert engine.lookup(engine.content(tokens, salt=b"b")).num_tokens == 0
        assert engine.lookup(tokens).num_tokens == 0
        assert engine.lookup(engine.content(tokens, salt=b"a")).num_tokens == 2 * CHUNK


def test_a_full_cpu_tier_evicts_children_first_and_serves_the_rest_from_disk(tmp_path: Path) -> None:
    recorder = Recorder()
    config = config_of(
        cpu(capacity="256KiB"), disk(tmp_path), memory={"staging": "1MiB", "huge_pages": False}
    )
    prompts = [prompt(20 + i, 8 * CHUNK) for i in range(6)]
    with engine_of(config, recorder=recorder) as engine:
        for tokens in prompts:
            assert store(engine, tokens) == 8 * CHUNK
            settle(engine)
        assert any(event.tier == "cpu" for event in recorder.of(ChunkEvicted))
        for tokens in prompts:
            assert retrieve(engine, tokens) == 8 * CHUNK
            settle(engine)
    resident: set[str] = set()
    for event in recorder.events:
        if isinstance(event, ChunkAdmitted | ChunkEvicted) and event.tier == "cpu":
            (resident.add if isinstance(event, ChunkAdmitted) else resident.discard)(event.key)


def test_admit_and_evict_events_are_numbered_without_gaps(tmp_path: Path) -> None:
    recorder = Recorder()
    with engine_of(config_of(cpu(capacity="128KiB"), disk(tmp_path)), recorder=recorder) as engine:
        for seed in range(5):
            store(engine, prompt(30 + seed, 6 * CHUNK))
        settle(engine)
    for tier in ("cpu", "disk"):
        numbers = [
            event.sequence
            for event in recorder.events
            if isinstance(event, ChunkAdmitted | ChunkEvicted) and event.tier == tier
        ]
        assert numbers == list(range(1, len(numbers) + 1))


def test_a_full_disk_tier_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    config = config_of(cpu(capacity="64KiB"), disk(tmp_path, capacity="2MiB"))
    with engine_of(config) as engine:
        for seed in range(40):
            store(engine, prompt(100 + seed, 6 * CHUNK))
            settle(engine)
        assert retrieve(engine, prompt(139, 6 * CHUNK)) == 6 * CHUNK
        settle(engine)
    used = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file())
    assert used <= 2 << 20


def test_what_moves_away_before_it_is_pinned_is_pinned_where_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(9, 4 * CHUNK)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        store(engine, tokens)
        settle(engine)
        pins = engine._chain.pins
        pin = pins.pin

        def late(places: set[tuple[str, StorageKey]], *, owner: str, ttl_s: float) -> str:
            engine.clear(search_range=["cpu"])  # as an eviction between looking and pinning
            return pin(places, owner=owner, ttl_s=ttl_s)

        monkeypatch.setattr(pins, "pin", late)
        found = engine.lookup(tokens, pin=True)
        assert found.tokens_by_tier == {"disk": 4 * CHUNK}
        assert all(pins.pinned("disk", key) for key in engine.content(tokens).keys(engine.part))
        assert engine.lookup_unpin(found.lookup_id) == 4
        assert not pins.active()
        settle(engine)


def test_pinned_chunks_survive_a_flood_until_unpinned(tmp_path: Path) -> None:
    tokens = prompt(50, 4 * CHUNK)
    with engine_of(config_of(cpu(capacity="256KiB"))) as engine:
        store(engine, tokens)
        pinned = engine.lookup(tokens, pin=True, owner="test")
        assert pinned.num_tokens == 4 * CHUNK
        for seed in range(20):
            store(engine, prompt(200 + seed, 6 * CHUNK))
        assert engine.lookup(tokens).num_tokens == 4 * CHUNK
        assert engine.lookup_unpin(pinned.lookup_id) == 4
        with pytest.raises(LeaseError):
            engine.lookup_unpin(pinned.lookup_id)
        for seed in range(20):
            store(engine, prompt(300 + seed, 6 * CHUNK))
        assert engine.lookup(tokens).num_tokens < 4 * CHUNK
        settle(engine)


def test_lookup_can_be_limited_to_named_tiers_and_takes_hashes(tmp_path: Path) -> None:
    tokens = prompt(60, 3 * CHUNK)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        content = engine.content(tokens)
        store(engine, tokens)
        settle(engine)
        assert engine.lookup(content, search_range=["disk"]).tokens_by_tier == {"disk": 3 * CHUNK}
        assert engine.lookup(hashes=content.hashes).num_tokens == 3 * CHUNK
        with pytest.raises(ConfigError, match=r"dsk.*cpu, disk"):
            engine.lookup(content, search_range=["dsk"])


def test_clear_empties_the_named_tier_only(tmp_path: Path) -> None:
    tokens = prompt(61, 3 * CHUNK + 16)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        store(engine, tokens)
        settle(engine)
        assert engine.clear(search_range=["cpu"]) == {"cpu": 4}
        assert engine.lookup(tokens).tokens_by_tier == {"disk": 3 * CHUNK + 16}
        assert engine.clear(tokens) == {"cpu": 0, "disk": 4}
        assert engine.lookup(tokens).num_tokens == 0
        settle(engine)


def test_prefetch_brings_a_prefix_into_memory(tmp_path: Path) -> None:
    tokens = prompt(62, 5 * CHUNK)
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        assert engine.prefetch(tokens).wait(60.0) == 5 * CHUNK
        assert engine.lookup(tokens).tokens_by_tier == {"cpu": 5 * CHUNK}
        settle(engine)


def test_prefetch_says_where_it_found_what(tmp_path: Path) -> None:
    tokens, recorder = prompt(63, 4 * CHUNK + 16), Recorder()
    with engine_of(config_of(cpu(), disk(tmp_path)), recorder=recorder) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        engine.prefetch(tokens, limit=2 * CHUNK).wait(60.0)
        prefetch = engine.prefetch(tokens)
        prefetch.wait(60.0)
        assert prefetch.sources == [("cpu", CHUNK)] * 2 + [("disk", CHUNK)] * 2 + [("disk", 16)]
        [first, second] = recorder.of(BroughtNear)
        assert [tier for tier, _ in first.bytes_by_tier] == ["disk"]
        assert [tier for tier, _ in second.bytes_by_tier] == ["cpu", "disk"]
        assert dict(second.bytes_by_tier)["cpu"] == dict(first.bytes_by_tier)["disk"]
        settle(engine)


def test_prefetch_fills_memory_even_where_hits_are_not_promoted(tmp_path: Path) -> None:
    tokens = prompt(65, 3 * CHUNK)
    with engine_of(config_of(cpu(), disk(tmp_path, promote="never"))) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        assert retrieve(engine, tokens) == 3 * CHUNK
        assert engine.lookup(tokens).tokens_by_tier == {"disk": 3 * CHUNK}
        assert engine.prefetch(tokens).wait(60.0) == 3 * CHUNK
        assert engine.lookup(tokens).tokens_by_tier == {"cpu": 3 * CHUNK}
        settle(engine)


def test_a_second_hit_promotes_where_the_config_says_so(tmp_path: Path) -> None:
    tokens = prompt(66, 3 * CHUNK)
    with engine_of(config_of(cpu(), disk(tmp_path, promote="on_second_hit"))) as engine:
        store(engine, tokens)
        settle(engine)
        engine.clear(search_range=["cpu"])
        for tiers in ({"disk": 3 * CHUNK}, {"cpu": 3 * CHUNK}):
            assert retrieve(engine, tokens) == 3 * CHUNK
            assert engine.lookup(tokens).tokens_by_tier == tiers


def test_a_tier_that_is_never_written_is_only_read(tmp_path: Path) -> None:
    tokens = prompt(67, 2 * CHUNK)
    with engine_of(config_of(disk(tmp_path))) as engine:
        store(engine, tokens)
    with engine_of(config_of(cpu(), disk(tmp_path, write="never"))) as engine:
        store(engine, prompt(68, 2 * CHUNK))
        settle(engine)
        assert engine.lookup(prompt(68, 2 * CHUNK)).tokens_by_tier == {"cpu": 2 * CHUNK}
        assert retrieve(engine, tokens) == 2 * CHUNK


def test_a_directory_that_another_engine_owns_is_a_tier_that_is_down(tmp_path: Path) -> None:
    tokens = prompt(69, 2 * CHUNK)
    recorder = Recorder()
    with (
        engine_of(config_of(disk(tmp_path))) as owner,
        engine_of(config_of(cpu(), disk(tmp_path)), recorder=recorder) as guest,
    ):
        (down,) = recorder.of(TierDown)
        assert "by this process" in down.reason
        assert store(guest, tokens) == 2 * CHUNK
        assert retrieve(guest, tokens) == 2 * CHUNK
        assert store(owner, tokens) == 2 * CHUNK


def test_stats_print_as_a_table(tmp_path: Path) -> None:
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        store(engine, prompt(70, 2 * CHUNK))
        settle(engine)
        lines = str(engine.stats()).splitlines()
    assert [line.split()[0] for line in lines] == ["tier", "cpu", "disk", "memory:"]
    assert "admitted 3" in lines[1]


def test_a_closed_engine_is_an_empty_cache_even_to_threads_in_the_middle_of_it(tmp_path: Path) -> None:
    engine = engine_of(config_of(cpu(), disk(tmp_path)))
    running = threading.Barrier(4)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        tokens = prompt(seed, 4 * CHUNK)
        try:
            engine.store(tokens, OracleKV(tokens))
            running.wait(60.0)
            while not stop.is_set():
                engine.store(tokens, OracleKV(tokens))
                retrieve(engine, tokens)
                engine.lookup(tokens)
        except BaseException as error:  # handed to the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(80 + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    running.wait(60.0)
    engine.close()
    engine.close()
    tokens = prompt(80, 4 * CHUNK)
    taken = engine.store(tokens, OracleKV(tokens))
    assert (taken.num_tokens, taken.num_known_tokens, taken.num_skipped_tokens) == (0, 0, 4 * CHUNK)
    assert [(tier.state, tier.entries) for tier in engine.stats().tiers][:1] == [("down", 0)]
    assert engine.prefetch(tokens).wait(5.0) == 0
    assert retrieve(engine, tokens) == 0
    stop.set()
    for thread in threads:
        thread.join(60.0)
    assert not errors


def test_arguments_of_a_lookup_that_are_a_near_miss_are_told(tmp_path: Path) -> None:
    with engine_of(config_of(cpu(), disk(tmp_path))) as engine:
        with pytest.raises(ConfigError, match=r"\['disk'\], not 'disk'"):
            engine.lookup(prompt(64, CHUNK), search_range="disk")
        with pytest.raises(ValueError, match="chunk hashes"):
            engine.lookup(hashes=["abcd"])  # type: ignore[list-item]


def test_a_chain_without_a_memory_tier_works(tmp_path: Path) -> None:
    tokens = prompt(63, 5 * CHUNK + 16)
    with engine_of(config_of(disk(tmp_path))) as engine:
        assert store(engine, tokens) == 5 * CHUNK + 16
        settle(engine)
        assert retrieve(engine, tokens) == 5 * CHUNK + 16
        settle(engine)


def test_a_damaged_file_is_a_miss_once_and_the_next_store_repairs_it(tmp_path: Path) -> None:
    tokens = prompt(64, 4 * CHUNK)
    recorder = Recorder()
    with engine_of(config_of(disk(tmp_path))) as engine:
        store(engine, tokens)
        settle(engine)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 3 * 4096 and "journal" not in file.name:
            with file.open("r+b") as handle:
                handle.seek(2 * 4096 + 17)
                byte = handle.read(1)
                handle.seek(2 * 4096 + 17)
                handle.write(bytes([byte[0] ^ 1]))
    with engine_of(config_of(disk(tmp_path)), recorder=recorder) as engine:
        assert engine.lookup(tokens).num_tokens == 4 * CHUNK
        assert retrieve(engine, tokens) == 0
        assert recorder.of(FrameRejected)
        settle(engine)
        assert store(engine, tokens) > 0
        settle(engine)
        for _ in range(4):
            store(engine, tokens)
            settle(engine)
            retrieve(engine, tokens)
            settle(engine)
        assert retrieve(engine, tokens) == 4 * CHUNK


def test_two_memory_tiers_and_a_tier_without_bound_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one"):
        engine_of(config_of(cpu(), cpu(name="cpu2")))
    with pytest.raises(ConfigError, match=r"tiers\[0\].capacity"):
        engine_of(config_of(cpu(capacity=None)))


@pytest.mark.parametrize(
    ("where", "config"),
    [
        ("memory.staging", config_of(cpu(), memory={"staging": "20KiB", "huge_pages": False})),
        (r"tiers\[0\].capacity", config_of(cpu(capacity="8KiB"))),
        (r"tiers\[0\].in_flight_bytes", config_of(cpu(in_flight_bytes="8KiB"))),
    ],
)
def test_a_bound_that_holds_no_frame_of_this_model_is_a_config_error(
    where: str, config: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=rf"{where}.*set at least 1MiB"):
        engine_of(config)
