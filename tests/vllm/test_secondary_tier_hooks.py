"""The secondary tier under vLLM's own TieringOffloadingManager, without a model: what vLLM's memory sees."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_backends import Controls, faulty

import lmcache_core.engine.engine as engine_module
from lmcache_core.errors import ConfigError, UnsupportedModel
from lmcache_core.sdk import Capabilities

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, and torch's
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import LookupResult, make_offload_key
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
    from vllm_tiering import CHUNK_NBYTES, PATIENCE_S, Tiering

A, B, C, D = (make_offload_key(sha256(name).digest(), 0) for name in (b"a", b"b", b"c", b"d"))
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> Controls:
    controls = Controls()
    monkeypatch.setattr(engine_module, "discover", lambda: faulty(controls))
    return controls


@pytest.fixture
def build(model: Path, controls: Controls) -> Iterator[Callable[..., Tiering]]:
    """Makes `Tiering`s, and shuts them down."""
    built: list[Tiering] = []

    def make(**options: Any) -> Tiering:
        built.append(Tiering(model, **options))
        return built[-1]

    yield make
    for op in list(controls.gates):
        controls.let_go(op)
    for tiering in built:
        tiering._view.release()
        tiering.manager.shutdown()
        assert not tiering.shared_memory.exists()


def test_what_leaves_the_cpu_comes_back_as_it_was(build: Callable[..., Tiering]) -> None:
    tiering = build()
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)  # A and B leave vLLM's memory
    request = tiering.request("3", A, B)
    assert tiering.found(request, A, B) == [HIT, HIT]
    rows = tiering.manager.prepare_load([A, B], request).chunk_ids
    assert [tiering.row(int(row)) for row in rows] == [key[:1] * CHUNK_NBYTES for key in (A, B)]


def test_a_late_load_never_lands_in_a_slot_that_was_reused(
    build: Callable[..., Tiering], controls: Controls
) -> None:
    tiering = build(num_chunks=1, deadline="60s", job_deadline="100ms")
    tiering.store(tiering.request("1", A), A)
    tiering.store(tiering.request("2", B), B)
    inside = controls.hang("get")
    assert tiering.found(tiering.request("3", A), A) == [MISS]
    assert inside.wait(PATIENCE_S)
    [row] = tiering.store(tiering.request("4", C), C)
    controls.let_go("get")
    tiering.tier._loads.close(time.monotonic() + PATIENCE_S)  # its threads have read A, and verified it
    assert tiering.tier._frames.chain.pool.stats().leases == 0
    assert tiering.row(row) == C[:1] * CHUNK_NBYTES


def test_a_load_that_fails_is_a_miss_for_its_request_and_another_may_try(
    build: Callable[..., Tiering], controls: Controls
) -> None:
    tiering = build()
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    controls.fail = lambda op, key: op == "get"
    request = tiering.request("3", A)
    assert tiering.found(request, A) == [MISS]
    controls.fail = lambda op, key: False
    assert tiering.manager.lookup(A, request) is MISS
    assert tiering.found(tiering.request("4", A), A) == [HIT]


def test_of_a_damaged_load_what_came_before_counts(build: Callable[..., Tiering], controls: Controls) -> None:
    tiering = build(num_chunks=3)
    tiering.store(tiering.request("1", A, B, C), A, B, C)
    name = tiering.tier._frames.names([B[:-4]])[0]
    value, parent = controls.values[name]
    controls.values[name] = (value[:-1] + bytes([value[-1] ^ 1]), parent)
    others = [make_offload_key(sha256(bytes([i])).digest(), 0) for i in range(3)]
    tiering.store(tiering.request("2", *others), *others)
    assert tiering.found(tiering.request("3", A, B, C), A, B, C)[:2] == [HIT, MISS]
    assert tiering.found(tiering.request("4", B), B) == [MISS]


def test_a_reset_waits_for_no_store_and_starts_anew(
    build: Callable[..., Tiering], controls: Controls
) -> None:
    tiering = build()
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    inside = controls.hang("get")
    request = tiering.request("3", A)
    tiering.manager.lookup(A, request)
    tiering.step()
    assert inside.wait(PATIENCE_S)
    tiering.manager.reset_cache()
    assert not tiering.manager.has_pending_work()
    controls.let_go("get")
    assert tiering.found(tiering.request("4", A), A) == [MISS]


def test_what_a_request_of_before_a_reset_stores_is_not_taken(build: Callable[..., Tiering]) -> None:
    tiering = build()
    before = tiering.request("1", A)
    tiering.manager.reset_cache()
    after = tiering.request("2", B)
    tiering.store(before, A)
    tiering.store(after, B)
    tiering.store(tiering.request("3", C, D), C, D)
    assert tiering.found(tiering.request("4", A), A) == [MISS]
    assert tiering.found(tiering.request("5", B), B) == [HIT]


@pytest.mark.timeout(50)
def test_a_shutdown_waits_for_no_backend(build: Callable[..., Tiering], controls: Controls) -> None:
    tiering = build(deadline="60s")
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    inside = controls.hang("get")
    tiering.manager.lookup(A, tiering.request("3", A))
    tiering.step()
    assert inside.wait(PATIENCE_S)
    tiering.tier.shutdown()
    tiering.tier.shutdown()


def test_more_transfers_than_may_wait_fail_at_once(build: Callable[..., Tiering], controls: Controls) -> None:
    tiering = build(jobs=1, deadline="60s", job_deadline="60s")
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    inside = controls.hang("get")
    waiting = tiering.request("3", A)
    tiering.manager.lookup(A, waiting)
    tiering.step()
    assert inside.wait(PATIENCE_S)
    assert tiering.found(tiering.request("4", B), B) == [MISS]
    controls.let_go("get")
    assert tiering.found(waiting, A) == [HIT]


def test_a_store_that_fails_is_a_miss_later(build: Callable[..., Tiering], controls: Controls) -> None:
    tiering = build()
    controls.fail = lambda op, key: op == "put"
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    assert tiering.found(tiering.request("3", A), A) == [MISS]
    assert tiering.tier._frames.chain.pool.stats().leases == 0


def test_vllm_counts_damaged_chunks(build: Callable[..., Tiering], controls: Controls) -> None:
    tiering = build()
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    for name, (value, parent) in list(controls.values.items()):
        controls.values[name] = (value[:-1] + bytes([value[-1] ^ 1]), parent)
    assert tiering.found(tiering.request("3", A), A) == [MISS]
    assert tiering.manager.get_stats().reduce()["vllm:lmcache_core_tier_rejected_frames"] == 1
    counted = [*tiering.tier.build_metric_definitions({})]
    assert counted == ["vllm:lmcache_core_tier_rejected_frames", "vllm:lmcache_core_tier_shed_stores"]
    assert tiering.tier.get_stats() is None


def test_a_finished_request_leaves_nothing_behind(build: Callable[..., Tiering]) -> None:
    tiering = build()
    for number in range(20):
        keys = (A, B) if number % 2 else (C, D)
        request = tiering.request(str(number), *keys)
        tiering.found(request, *keys)
        tiering.store(request, *keys)
        tiering.manager.on_request_finished(request)
    tiering.until_idle()
    assert not tiering.tier._requests
    assert not tiering.tier._loads._open
    assert not tiering.tier._stores._open
    assert tiering.tier._frames.chain.pool.stats().leases == 0


def test_a_transfer_that_is_not_understood_fails_and_is_not_asked_for_again(
    build: Callable[..., Tiering], caplog: pytest.LogCaptureFixture
) -> None:
    tiering = build()
    tiering.store(tiering.request("1", A, B), A, B)
    tiering.store(tiering.request("2", C, D), C, D)
    placeless = tiering.request("3")
    assert tiering.found(placeless, A) == [MISS]
    assert "can't be done" in caplog.text
    assert tiering.found(tiering.request("4", A), A) == [HIT]


def test_every_hook_takes_what_the_installed_vllm_gives() -> None:
    from lmcache_core.connectors.vllm.tier import SecondaryTier

    for name, hook in inspect.getmembers(SecondaryTierManager, inspect.isfunction):
        ours = getattr(SecondaryTier, name)
        if ours is not hook and name != "__init__":
            assert [*inspect.signature(ours).parameters] == [*inspect.signature(hook).parameters], name
    assert {*inspect.signature(SecondaryTierManager).parameters} <= {
        *inspect.signature(SecondaryTier).parameters
    }


def shared() -> Capabilities:
    return Capabilities(medium="network", delete=True, shared=True, persistent=True, max_in_flight=2)


def test_a_shared_store_is_asked_behind_the_scheduler(
    build: Callable[..., Tiering], controls: Controls
) -> None:
    controls.capabilities = shared()
    writer = build()
    writer.store(writer.request("1", A, B), A, B)
    reader = build()
    inside = controls.hang("stat")
    request = reader.request("2", A, B, C)
    assert [reader.manager.lookup(key, request) for key in (A, B, C)] == [RETRY] * 3
    reader.step()
    assert inside.wait(PATIENCE_S)
    assert reader.manager.lookup(A, request) is RETRY
    controls.let_go("stat")
    assert reader.found(request, A, B, C) == [HIT, HIT, MISS]
    assert controls.calls["stat"] < 3, "one question for all of them"


def test_a_shared_store_that_gives_no_answer_is_a_miss(
    build: Callable[..., Tiering], controls: Controls
) -> None:
    controls.capabilities = shared()
    tiering = build(deadline="100ms")
    controls.hang("stat")
    assert tiering.found(tiering.request("1", A), A) == [MISS]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"capcity": "1GiB"}, "capacity"),
        ({"backend": None}, "backend"),
        ({"backend": "dsik"}, "dsik"),
        ({"capacity": None}, "capacity"),
        ({"capacity": "8KiB"}, "capacity"),
        ({"staging": "much"}, "staging"),
        ({"options": {"path": 3}}, "path"),
        ({"promote": "always"}, "promote"),
        ({"write": "never"}, "write"),
        ({"locality": "HERE"}, "locality"),
    ],
)
def test_an_entry_that_cannot_work_is_one_error_at_the_start(
    model: Path, controls: Controls, entry: dict[str, object], said: str
) -> None:
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    with pytest.raises(ConfigError, match=said):
        Tiering(model, **entry)
    assert set(Path("/dev/shm").glob("vllm_offload_*")) <= before


def test_hashes_with_a_random_seed_are_refused_by_what_outlives_the_process(
    model: Path, build: Callable[..., Tiering], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        Tiering(model, algorithm="xxhash")
    in_memory = build(algorithm="xxhash", backend="cpu")
    in_memory.store(in_memory.request("1", A), A)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    build(algorithm="xxhash")


def test_a_change_of_the_scheme_or_the_seed_changes_every_name(
    build: Callable[..., Tiering], monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**options: Any) -> str:
        return build(**options).tier._frames.names([A[:-4]])[0]

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    names = [name(), name(algorithm="sha256_cbor")]
    assert name() == names[0]
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        names.append(name())
    assert len(set(names)) == 4


def test_a_change_of_layout_or_device_changes_every_name(
    build: Callable[..., Tiering], monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**options: Any) -> str:
        return build(**options).tier._frames.names([A[:-4]])[0]

    names = [name(), name(layout="LBNHC")]
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    names.append(name())
    assert len(set(names)) == 3


def test_blocks_of_an_unknown_layout_are_refused(model: Path, controls: Controls) -> None:
    with pytest.raises(UnsupportedModel, match="layout"):
        Tiering(model, layout=None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_config": SimpleNamespace()}, "LoRA adapters by their path"),
        ({"windows": (None, 64)}, "this model: full attention, a window of 64;"),
        ({"windows": (64,)}, "this model: a window of 64;"),
    ],
)
def test_what_only_the_connector_can_keep_is_one_error_at_the_start_that_says_so(
    model: Path, controls: Controls, options: dict[str, Any], said: str
) -> None:
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    with pytest.raises(
        UnsupportedModel, match=f'^secondary_tiers, .*{said}.*"LMCacheCoreConnector" in place'
    ):
        Tiering(model, **options)
    assert set(Path("/dev/shm").glob("vllm_offload_*")) <= before
