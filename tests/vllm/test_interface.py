"""The connector against the installed vLLM's own base class: what drifts is seen here first."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from lmcache_core.connectors.vllm.groups import NULL_BLOCK

PROBE = """
import inspect, json
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as base, SupportsHMA
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput
from lmcache_core.connectors import vllm
from lmcache_core.connectors.vllm import connector
from lmcache_core.connectors.vllm.metadata import AddressMetadata, ReportMetadata
from lmcache_core.connectors.vllm.ranks import RankAddress
vllm.register(); vllm.register()
ours = KVConnectorFactory.get_connector_class_by_name(vllm.NAME)
ended = []
made = object.__new__(ours)
made._scheduler = SimpleNamespace(finished=ended.append)
made.request_finished(SimpleNamespace(request_id="one group"), [1])
made.request_finished_all_groups(SimpleNamespace(request_id="all groups"), ([1], [2]))

connector.RankLookups = list
several = object.__new__(ours)
several._scheduler, several._publisher = None, None
several._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
several._make_scheduler = lambda addresses: [address.path for address in addresses]
first, second = (RankAddress(path, b"nonce", b"{}", {}, False) for path in ("first", "second"))
for handshake in ([], [object(), object()], [AddressMetadata(first), object()]):
    several.set_xfer_handshake_metadata_pp_aware({(0, rank): each for rank, each in enumerate(handshake)})
def told(**addresses):
    ranks = ReportMetadata(None, {int(rank[1:]): address for rank, address in addresses.items()})
    several.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=ranks))
    return several._scheduler
told(_1=second)
missing = {
    "matched": several.get_num_new_matched_tokens(None, 0),
    "asked": several.build_connector_meta(None).where,
    "reached": [told(_1=second), told(_1=second, _0=first)],
}
emptied = []
several._pool = SimpleNamespace(num_gpu_blocks=3, evict_blocks=emptied.append)
several._vllm_config.cache_config = SimpleNamespace(enable_prefix_caching=True)
several._scheduler = None
several._asked_where = True
several._worker = SimpleNamespace(report=lambda: None)
several._address = lambda: open("/dev/null/no-place-for-a-socket")
several.update_connector_output(KVConnectorOutput())
several.update_connector_output(KVConnectorOutput(invalid_block_ids={1}))

pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
def parameters(function):
    return [[each.name, each.kind.name] for each in inspect.signature(function).parameters.values()]
theirs = {**vars(base), **vars(SupportsHMA)}
hooks = {n: parameters(f) for n, f in theirs.items() if inspect.isfunction(f) and not n.startswith("_")}
print("@@" + json.dumps({
    "abstract": sorted(ours.__abstractmethods__),
    "hooks": hooks,
    "ours": {n: parameters(f) for n, f in vars(ours).items() if n in hooks},
    "strays": [n for n in vars(ours) if n[0] != "_" and not hasattr(base, n) and n not in hooks],
    "groups": issubclass(ours, SupportsHMA),
    "ended": ended,
    "missing": missing,
    "unanswered": several.build_connector_worker_meta(),
    "emptied": [sorted(blocks) for blocks in emptied],
    "empties": parameters(BlockPool.evict_blocks),
    "null_block": pool.null_block.block_id,
    "used_blocks": pool.num_gpu_blocks - pool.get_num_free_blocks(),
}))
"""

KNOWN = frozenset(
    {
        *("get_mem_pool_context", "bind_connector_metadata", "clear_connector_metadata"),
        *("has_connector_metadata", "register_kv_caches", "set_host_xfer_buffer_ops", "finish_forward"),
        *("reset_capture_state", "handle_preemptions", "start_load_kv", "wait_for_layer_load"),
        *("save_kv_layer", "wait_for_save", "get_finished", "get_transfer_results"),
        *("get_block_ids_with_load_errors", "shutdown", "get_kv_connector_stats"),
        *("get_kv_connector_kv_cache_events", "get_handshake_metadata", "build_connector_worker_meta"),
        *("bind_kv_cache_manager", "bind_gpu_block_pool", "get_loaded_kv_cache_group_ids"),
        *("get_num_new_matched_tokens", "get_external_cache_hit_sources", "update_state_after_alloc"),
        *("build_connector_meta", "on_new_request", "update_connector_output", "request_finished"),
        *("request_finished_all_groups",),
        *("register_finished_partial_tail", "take_events", "has_pending_block_frees"),
        *("has_pending_push_work", "get_finished_count", "set_xfer_handshake_metadata"),
        *("set_xfer_handshake_metadata_pp_aware", "reset_cache"),
    }
)
"""vLLM 0.32's hooks. A new one must be read, and listed, before the connector is said to fit."""


@pytest.fixture(scope="module")
def seen() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=150, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("@@"))


def test_nothing_abstract_is_left_open(seen: Any) -> None:
    assert seen["abstract"] == []


def test_every_hook_of_the_base_class_is_known(seen: Any) -> None:
    assert set(seen["hooks"]) == KNOWN


def test_models_with_several_groups_of_layers_are_taken(seen: Any) -> None:
    assert seen["groups"]
    assert (seen["null_block"], seen["used_blocks"]) == (NULL_BLOCK, 1)


def test_our_hooks_are_hooks(seen: Any) -> None:
    assert seen["strays"] == []


def test_our_hooks_take_what_theirs_take(seen: Any) -> None:
    variable = inspect.Parameter.VAR_KEYWORD.name
    for name, ours in seen["ours"].items():
        theirs = seen["hooks"][name]
        if any(kind == variable for _, kind in ours):
            continue
        assert ours == theirs, name


def test_a_request_ends_by_whichever_hook_vllm_calls(seen: Any) -> None:
    """Its MultiConnector calls the older one when a connector beside ours knows one group only."""
    assert seen["ended"] == ["one group", "all groups"]


def test_ranks_whose_handshake_is_another_connector_s_are_asked_and_all_must_answer(seen: Any) -> None:
    """Its MultiConnector hands on the first handshake that it is given, to all of its connectors."""
    assert seen["missing"] == {"matched": [0, False], "asked": True, "reached": [None, ["first", "second"]]}
    assert seen["unanswered"] is None, "it may raise, but not into the engine"


def test_vllm_s_prefix_cache_is_emptied_when_any_connector_s_load_failed(seen: Any) -> None:
    assert seen["emptied"] == [[0, 1, 2]]
    assert [name for name, _ in seen["empties"]] == ["self", "block_ids"]
