"""The secondary tier's parts that need no vLLM: its transfers, its frames, its view of vLLM's memory."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
from faulty_backends import Controls, faulty

from lmcache_core.config import TierConfig
from lmcache_core.connectors.vllm.tier_frames import ChunkFrames, HostRows
from lmcache_core.connectors.vllm.tier_identity import OffloadIdentity, engine_configs
from lmcache_core.connectors.vllm.tier_jobs import Chunk, Job, JobQueue
from lmcache_core.connectors.vllm.tier_settings import TierSettings, read_tier_settings
from lmcache_core.errors import ConfigError, UnsupportedModel
from lmcache_core.identity import HostScheme, ModelRecord, Part, StorageKey
from lmcache_core.registry import Registry, discover
from lmcache_core.tiers import prepare_tiers
from lmcache_core.tiers.writes import RECOVER_CAPACITY_S

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
CHUNK, LAYERS, CONTENT = 16, 3, 64
IDENTITY = OffloadIdentity(
    model=ModelRecord(weights="00" * 32, config={}, chunk_tokens=CHUNK),
    part=Part(layers=(0, LAYERS), heads=(0, 1), content_format="test", content_nbytes=CONTENT),
    scheme=HostScheme(algorithm="test", seed="0", block_tokens=CHUNK),
)
SEGMENT_NBYTES = CHUNK * CONTENT


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def job(job_id: int, *, deadline: float = 100.0) -> Job:
    chunk = Chunk(key=b"key", name=StorageKey("c"), first_token=0, row=0)
    return Job(job_id, "request", [chunk], {}, started=0.0, deadline=deadline)


def queue(run: Callable[[Job], None], clock: Clock, *, limit: int = 8) -> JobQueue:
    return JobQueue("test", run, num_threads=1, limit=limit, clock=clock)


def finished(jobs: JobQueue, count: int) -> list[Job]:
    """Polls, as vLLM does, until so many have ended."""
    ended: list[Job] = []
    give_up_at = time.monotonic() + PATIENCE_S
    while len(ended) < count:
        assert time.monotonic() < give_up_at
        ended += jobs.finished()
    return ended


def done(each: Job) -> None:
    each.touch(lambda: each.done.append(b"key"))


# -- transfers -----------------------------------------------------------------------------------


def test_a_job_touches_nothing_once_it_has_ended() -> None:
    touched: list[int] = []
    transfer = job(1)
    assert transfer.touch(lambda: touched.append(1))
    assert [transfer.end(), transfer.end()] == [True, False]
    assert not transfer.touch(lambda: touched.append(2))
    assert touched == [1]


def test_ending_a_job_waits_for_the_copy_that_runs() -> None:
    inside, go_on, order = threading.Event(), threading.Event(), []
    transfer = job(1)

    def copy() -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        order.append("copied")

    copying = threading.Thread(target=transfer.touch, args=(copy,))
    copying.start()
    assert inside.wait(PATIENCE_S)
    ending = threading.Thread(target=lambda: (transfer.end(), order.append("ended")))
    ending.start()
    go_on.set()
    copying.join()
    ending.join()
    assert order == ["copied", "ended"]


def test_jobs_run_in_order_and_each_is_reported_once() -> None:
    jobs = queue(done, Clock())
    for number in range(5):
        jobs.submit(job(number))
    ended = finished(jobs, 5)
    assert [each.job_id for each in ended] == [0, 1, 2, 3, 4]
    assert all(each.succeeded for each in ended)
    assert jobs.finished() == []
    jobs.close(PATIENCE_S)


def test_a_job_past_its_deadline_has_failed_whether_it_runs_or_waits() -> None:
    clock, release, inside = Clock(), threading.Event(), threading.Event()

    def stuck(each: Job) -> None:
        inside.set()
        release.wait(PATIENCE_S)
        done(each)

    jobs = queue(stuck, clock)
    jobs.submit(job(1, deadline=1.0))
    jobs.submit(job(2, deadline=2.0))
    assert inside.wait(PATIENCE_S)
    assert jobs.finished() == []
    clock.now = 1.5
    assert [(each.job_id, each.succeeded) for each in jobs.finished()] == [(1, False)]
    clock.now = 2.5
    late = jobs.finished()
    assert [(each.job_id, each.succeeded) for each in late] == [(2, False)]
    release.set()
    jobs.close(clock.now + PATIENCE_S)
    assert jobs.finished() == []
    assert late[0].done == []


def test_a_job_that_raises_has_failed_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    def run(each: Job) -> None:
        if each.job_id == 1:
            raise RuntimeError("broken")
        done(each)

    jobs = queue(run, Clock())
    jobs.submit(job(1))
    jobs.submit(job(2))
    assert [each.succeeded for each in finished(jobs, 2)] == [False, True]
    assert "broken" in caplog.text
    jobs.close(PATIENCE_S)


def test_a_job_beyond_the_limit_or_after_the_close_fails_at_once() -> None:
    release = threading.Event()
    jobs = queue(lambda each: done(each) if release.wait(PATIENCE_S) else None, Clock(), limit=2)
    for number in range(3):
        jobs.submit(job(number))
    assert [(each.job_id, each.succeeded) for each in finished(jobs, 1)] == [(2, False)]
    release.set()
    assert [each.job_id for each in finished(jobs, 2)] == [0, 1]
    jobs.close(PATIENCE_S)
    jobs.submit(job(3))
    assert [(each.job_id, each.succeeded) for each in jobs.finished()] == [(3, False)]


def test_a_close_lets_what_was_submitted_finish() -> None:
    jobs = queue(done, Clock())
    for number in range(4):
        jobs.submit(job(number))
    jobs.close(PATIENCE_S)
    assert [each.succeeded for each in jobs.finished()] == [True] * 4


# -- vLLM's memory -------------------------------------------------------------------------------


def test_rows_are_moved_to_where_they_belong_and_no_other_byte_changes() -> None:
    memory = bytearray(b"." * 40)
    rows = HostRows(memoryview(memory).cast("B", shape=[4, 10]))
    segments = [memoryview(bytearray(b"abcd")), memoryview(bytearray(b"efgh"))]
    rows.scatter(2, segments)
    assert memory == b"." * 20 + b"abcdefgh.." + b"." * 10
    back = [memoryview(bytearray(4)), memoryview(bytearray(4))]
    rows.gather(2, back)
    assert [bytes(each) for each in back] == [b"abcd", b"efgh"]
    for row in (-1, 4):
        with pytest.raises(ValueError, match="row"):
            rows.gather(row, back)
    rows.release()


# -- frames --------------------------------------------------------------------------------------


def open_frames(
    registry: Registry,
    scheme: HostScheme = IDENTITY.scheme,
    clock: Callable[[], float] = time.monotonic,
    **tier: object,
) -> ChunkFrames:
    settings = read_tier_settings({"staging": "1MiB", "capacity": "4MiB", **tier})
    identity = OffloadIdentity(model=IDENTITY.model, part=IDENTITY.part, scheme=scheme)
    return ChunkFrames(identity, settings.cache_config(CHUNK), registry, clock=clock)


def fill(letter: bytes) -> Callable[[object], bool]:
    def gather(segments: list[memoryview]) -> bool:
        for segment in segments:
            segment[:] = letter * SEGMENT_NBYTES
        return True

    return gather  # type: ignore[return-value]


def loaded(frames: ChunkFrames, names: list[StorageKey], first: int = 0) -> list[bytes]:
    """The first byte of each chunk that comes."""
    seen: list[bytes] = []

    def scatter(position: int, segments: object) -> bool:
        assert position == len(seen)
        pieces = {bytes(segment) for segment in segments}  # type: ignore[attr-defined]
        [piece] = pieces
        assert piece == piece[:1] * SEGMENT_NBYTES
        seen.append(piece[:1])
        return True

    firsts = [first + i * CHUNK for i in range(len(names))]
    assert frames.load(names, firsts, scatter) == len(seen)
    return seen


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[], ChunkFrames]]:
    opened: list[ChunkFrames] = []

    def make() -> ChunkFrames:
        for frames in opened:
            frames.close(time.monotonic() + PATIENCE_S)
        opened.append(open_frames(discover(), backend="disk", options={"path": str(tmp_path)}))
        return opened[-1]

    yield make
    for frames in opened:
        frames.close(time.monotonic() + PATIENCE_S)


def store(frames: ChunkFrames, digests: list[bytes]) -> list[StorageKey]:
    names, marks = frames.names(digests), frames.mark()
    for position, (name, digest) in enumerate(zip(names, digests, strict=True)):
        assert frames.store(name, position * CHUNK, fill(digest[:1]), marks)
    assert frames.chain.flush(time.monotonic() + PATIENCE_S)
    return names


DIGESTS = [letter * 32 for letter in (b"a", b"b", b"c")]


def test_chunks_are_found_by_their_hashes_after_a_restart(disk: Callable[[], ChunkFrames]) -> None:
    names = store(disk(), DIGESTS)
    frames = disk()
    assert frames.names(DIGESTS[1:]) == names[1:], "a chunk's name depends on no other"
    assert [frames.known(name) for name in names] == [True] * 3
    assert loaded(frames, names) == [b"a", b"b", b"c"]
    assert loaded(frames, names[1:], first=CHUNK) == [b"b", b"c"]
    assert frames.chain.pool.stats().leases == 0


def test_a_chunk_of_another_place_is_no_hit(disk: Callable[[], ChunkFrames]) -> None:
    frames = disk()
    names = store(frames, DIGESTS)
    assert loaded(frames, names, first=CHUNK) == []
    assert frames.known(names[0]) is False


def test_a_new_epoch_shares_nothing_with_what_was_before(disk: Callable[[], ChunkFrames]) -> None:
    frames = disk()
    names = store(frames, DIGESTS)
    frames.new_epoch()
    assert not {*frames.names(DIGESTS)} & {*names}


def test_a_chunk_whose_memory_was_taken_back_is_not_stored() -> None:
    controls = Controls()
    frames = open_frames(faulty(controls), backend="faulty")
    [name] = frames.names(DIGESTS[:1])
    assert not frames.store(name, 0, lambda segments: False, frames.mark())
    frames.close(time.monotonic() + PATIENCE_S)
    assert name not in controls.values


class Full:
    """Chunks stored one after the other, on a fake clock, in a store that is smaller than its bound."""

    def __init__(self) -> None:
        self.clock, self.controls = Clock(), Controls()
        self.frames = open_frames(faulty(self.controls), clock=self.clock, backend="faulty")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.frames.close(self.clock.now + PATIENCE_S)

    def store(self, *numbers: int) -> list[int]:
        """Which of all chunks so far are held then."""
        for number in numbers:
            [name] = self.frames.names([bytes([number]) * 32])
            self.frames.store(name, 0, fill(b"x"), self.frames.mark())
            assert self.frames.chain.flush(self.clock.now + PATIENCE_S)
        return [i for i in range(100) if self.frames.known(self.frames.names([bytes([i]) * 32])[0])]


@pytest.fixture
def full() -> Iterator[Full]:
    with Full() as store:
        yield store


def test_a_store_that_is_full_below_its_bound_keeps_the_newest_and_grows_again_after_a_minute(
    full: Full,
) -> None:
    assert full.store(1, 2, 3) == [1, 2, 3]
    full.controls.room = full.controls.nbytes
    assert full.store(4) == [2, 3, 4]
    assert full.store(5, 6, 7) == [5, 6, 7]
    full.controls.room = None
    assert full.store(8) == [6, 7, 8], "it is believed to be full for a while"
    full.clock.now += RECOVER_CAPACITY_S
    assert full.store(9, 10) == [6, 7, 8, 9, 10]


def test_a_store_that_had_no_room_for_any_chunk_takes_some_when_it_has(full: Full) -> None:
    """The record of the model, which is small, got in."""
    full.controls.room = 10_000
    assert full.store(1, 2) == []
    assert full.controls.nbytes > 0
    full.controls.room = None
    full.clock.now += RECOVER_CAPACITY_S
    assert full.store(3, 4) == [3, 4]


def test_random_seeds_are_refused_by_what_outlives_the_process() -> None:
    scheme = HostScheme(algorithm="xxhash", seed=None, block_tokens=CHUNK)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        open_frames(faulty(Controls()), scheme, backend="faulty")
    in_memory = open_frames(discover(), scheme, backend="cpu")
    names = store(in_memory, DIGESTS)
    assert loaded(in_memory, names) == [b"a", b"b", b"c"]
    in_memory.close(time.monotonic())


# -- settings, and where vLLM's configuration comes from -----------------------------------------


@pytest.mark.parametrize("key", ["promote", "write"])
def test_what_vllm_decides_is_no_setting(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read_tier_settings({"backend": "disk", key: "never"})


def test_a_mistyped_key_is_named_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"stagin.*staging"):
        read_tier_settings({"backend": "disk", "stagin": "1GiB"})


def test_the_page_lists_every_setting_with_its_default_and_its_example_works() -> None:
    page = (ROOT / "docs/how-to/vllm-secondary-tier.md").read_text()
    [example] = re.findall(r"--kv-transfer-config '(.*?)'\n", page, re.DOTALL)
    [entry] = json.loads(example)["kv_connector_extra_config"]["secondary_tiers"]
    vllm_keys = {key: entry.pop(key) for key in ("type", "module_path")}
    assert vllm_keys == {"type": "lmcache-core", "module_path": "lmcache_core.connectors.vllm.tier"}
    settings = read_tier_settings(entry)
    prepare_tiers(settings.cache_config(CHUNK), discover())
    listed = dict(re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", page, re.MULTILINE))
    own = {*TierSettings.__struct_fields__} - {*TierConfig.__struct_fields__} | {"name"}
    assert listed == {key: str(getattr(settings, key) or "none") for key in own}
    inherited = {*TierConfig.__struct_fields__} - {"name", "promote", "write"}
    assert all(f"`{key}`" in page for key in inherited)


def test_the_configuration_is_that_of_the_engine_that_is_built() -> None:
    def build(vllm_config: object, kv_cache_config: object) -> tuple[object, object]:
        return engine_configs("mine")

    mine, other = (
        SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=name)) for name in ("mine", "other")
    )
    assert build(mine, "kv") == (mine, "kv")
    with pytest.raises(UnsupportedModel, match="which model"):
        build(other, "kv")
