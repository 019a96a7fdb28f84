"""vLLM: what is refused, and whose KV a rank's blocks are; from configurations made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_by_hand import Config, vllm_config

from lmcache_core.connectors.vllm import identity
from lmcache_core.connectors.vllm import rank as rank_module
from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.connectors.vllm.identity import in_order, model_record, rank_part
from lmcache_core.connectors.vllm.rank import own_layers
from lmcache_core.connectors.vllm.settings import cache_config, read_settings
from lmcache_core.connectors.vllm.support import attention_groups, check_config
from lmcache_core.errors import ConfigError, UnsupportedModel
from lmcache_core.identity import Part, differences


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"load_config__load_format": "dummy"}, "load format 'dummy'"),
        ({"cache_config__calculate_kv_scales": True}, "KV scales computed at run time"),
        ({"cache_config__cache_dtype": "fp8"}, "KV of dtype fp8"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculative decoding by 'eagle3'"),
        ({"model_config__runner_type": "pooling"}, "the runner 'pooling'"),
        ({"model_config__is_encoder_decoder": True}, "an encoder-decoder"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_config(vllm_config(**changes))


def test_a_plain_model_and_drafts_without_a_model_are_served() -> None:
    check_config(vllm_config())
    check_config(vllm_config(speculative_config=SimpleNamespace(method="ngram")))


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def groups(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_groups_of_full_attention_and_of_windows_are_served_and_no_others() -> None:
    full, window = FullAttentionSpec(block_size=128), SlidingWindowSpec(block_size=64, sliding_window=100)
    assert attention_groups(groups(full)) == (Group(128),)
    assert attention_groups(groups(window, full)) == (Group(64, window=100), Group(128))
    with pytest.raises(UnsupportedModel, match="kind MambaSpec"):
        attention_groups(groups(full, MambaSpec()))
    with pytest.raises(UnsupportedModel, match="attend to later tokens"):
        attention_groups(groups(FullAttentionSpec(block_size=128, non_causal=True)))
    with pytest.raises(UnsupportedModel, match="without KV"):
        attention_groups(groups())


def part(rank: int, ranks: int, heads: int, **changes: Any) -> Part:
    config = vllm_config(parallel_config__rank=rank, parallel_config__tensor_parallel_size=ranks, **changes)
    spec = SimpleNamespace(num_kv_heads=heads, block_size=128, dtype="torch.bfloat16")
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(4)]
    return rank_part(config, spec, names, heads * 128 * 256, "amx")


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "vllm_version", lambda: "0.32.0")


def test_a_rank_s_part_is_its_heads_of_the_whole_model() -> None:
    assert part(0, 1, 8).heads == (0, 8)
    assert [part(rank, 4, 2).heads for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert part(6, 4, 2).heads == (4, 6), "the second stage of a pipeline"


def test_ranks_that_hold_the_same_heads_have_the_same_part() -> None:
    assert [part(rank, 16, 1).heads for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert part(2, 16, 1).digest == part(3, 16, 1).digest


def test_the_order_of_bytes_in_a_block_is_part_of_the_content_format() -> None:
    assert part(0, 1, 8).content_format == "vllm 0.32.0 blocks amx bfloat16 128"


def test_heads_or_layers_that_cannot_be_placed_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="3 of 8 KV heads on rank 1 of 2"):
        part(1, 2, 3)
    spec = SimpleNamespace(num_kv_heads=8, block_size=128, dtype="torch.bfloat16")
    with pytest.raises(UnsupportedModel, match=r"layers \[1, 3\]"):
        rank_part(vllm_config(), spec, ["m.1.attn", "m.3.attn"], 8 * 128 * 256, "amx")
    with pytest.raises(UnsupportedModel, match="doesn't say its place"):
        in_order(["model.layers.one.attn"])


def test_layers_are_ordered_by_number_not_by_name() -> None:
    names = [f"model.layers.{layer}.attn" for layer in (10, 9, 2, 11)]
    assert in_order(names) == [f"model.layers.{layer}.attn" for layer in (2, 9, 10, 11)]


def test_a_layer_that_reads_another_s_kv_is_not_counted_and_the_first_one_names_it() -> None:
    """vLLM lists both in the group, and gives both the same tensor."""
    shared, other, last = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (1, 2, 3))
    layers = {"m.10.attn": last, "m.2.attn": shared, "m.0.attn": shared, "m.1.attn": other}
    caches: Any = layers
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[*layers])])
    for names in ([*layers], [*reversed(layers)]):
        config.kv_cache_groups[0].layer_names = names
        assert own_layers(config, caches) == [["m.0.attn", "m.1.attn", "m.10.attn"]]
    config.kv_cache_groups[0].layer_names = ["m.0.attn"]
    with pytest.raises(UnsupportedModel, match=r"m\.1\.attn.* are in no group"):
        own_layers(config, caches)


def test_a_second_connector_of_one_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two of MultiConnector's: both would have the lookups of one."""
    monkeypatch.setitem(rank_module._caches, "an engine", object())
    config = vllm_config(kv_transfer_config=SimpleNamespace(engine_id="an engine"))
    with pytest.raises(UnsupportedModel, match="one LMCacheCoreConnector already"):
        rank_module.open_rank(config, None, {}, read_settings({"config": "cache.yaml"}))


def test_every_byte_of_the_weights_and_every_field_that_counts_is_in_the_record(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 5000)
    first = model_record(vllm_config(tmp_path), 256, None)
    again = model_record(vllm_config(tmp_path, model_config__max_model_len=1024), 256, None)
    assert first == again
    half = model_record(vllm_config(tmp_path, model_config__dtype="torch.float16"), 256, None)
    assert [each.field for each in differences(first, half)] == ["config.compute_dtype"]
    weights.write_bytes(b"a" * 4999 + b"b")
    other = model_record(vllm_config(tmp_path), 256, None)
    assert [each.field for each in differences(first, other)] == ["weights"]


def test_which_weights_of_a_folder_are_loaded_is_in_the_record(tmp_path: Path) -> None:
    """It may hold those of PyTorch beside others, as safetensors."""
    (tmp_path / "model.safetensors").write_bytes(b"a")
    (tmp_path / "pytorch_model.bin").write_bytes(b"b")
    usual = model_record(vllm_config(tmp_path), 256, None)
    other = model_record(vllm_config(tmp_path, load_config__load_format="pt"), 256, None)
    assert [each.field for each in differences(usual, other)] == ["config.load_format"]


def test_the_longest_sequence_counts_where_frequencies_depend_on_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    rope = Config(rope_parameters={"rope_type": "longrope"}, max_position_embeddings=99)
    changes = {"model_config__hf_config": rope, "model_config__hf_text_config": rope}
    short = model_record(vllm_config(tmp_path, model_config__max_model_len=1024, **changes), 256, None)
    long = model_record(vllm_config(tmp_path, model_config__max_model_len=4096, **changes), 256, None)
    assert [each.field for each in differences(short, long)] == ["config.max_model_len"]


def test_weights_that_cannot_be_found_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="weight files of nobody/nothing can't be found"):
        model_record(vllm_config("nobody/nothing"), 256, None)


def test_chunks_are_rounded_up_to_whole_blocks_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tier = {"name": "cpu", "backend": "cpu", "capacity": "1MiB"}
    settings = read_settings({"config": {"chunk_tokens": 208, "tiers": [tier]}})
    assert cache_config(settings, 128).chunk_tokens == 256
    assert "no multiple of the engine's blocks of 128 tokens: using 256" in caplog.text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "kv_connector_extra_config.*config"),
        ({"config": "c.yaml", "prefetch_deadlin": "1s"}, "prefetch_deadline"),
        ({"config": "c.yaml", "prefetches": 0}, "kv_connector_extra_config.prefetches"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(extra)
