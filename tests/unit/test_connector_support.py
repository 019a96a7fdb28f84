"""Which Transformers models the connector takes, and what it says to the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from tiny_models import SIZES, gpt2, llama, made
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmcache_core.connectors.transformers.forward import Forward, unwrapped
from lmcache_core.connectors.transformers.identity import part_of
from lmcache_core.connectors.transformers.modules import interventions
from lmcache_core.connectors.transformers.support import check_model, probe
from lmcache_core.connectors.transformers.watch import Watch
from lmcache_core.connectors.transformers.workspace import KVShape, RoomyLayer
from lmcache_core.errors import UnsupportedModel


def attach(model: Any) -> KVShape:
    base = unwrapped(model)
    check_model(base)
    return probe(base, Forward(base))


def refusal(model: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        attach(model)
    return str(caught.value)


def sized(config_class: Any, **changes: Any) -> Any:
    return made(config_class(**{**SIZES, **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_llama_is_taken_in_its_own_dtype(dtype: torch.dtype) -> None:
    shape = attach(llama(dtype=dtype))
    assert shape == KVShape(num_layers=2, num_heads=2, dim=16, dtype=dtype)
    part = part_of(shape)
    assert (part.layers, part.heads) == ((0, 2), (0, 2))
    assert part.content_nbytes == 2 * 16 * dtype.itemsize


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(gpt2, id="absolute positions"),
        pytest.param(lambda: sized(t.Qwen2Config), id="qwen2"),
        pytest.param(lambda: sized(t.Qwen3Config, head_dim=16), id="qwen3"),
        pytest.param(lambda: sized(t.MistralConfig, sliding_window=None), id="mistral without a window"),
        pytest.param(
            lambda: made(t.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)), id="alibi"
        ),
        pytest.param(
            lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            id="linear rope",
        ),
        pytest.param(
            lambda: llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), id="yarn"
        ),
    ],
)
def test_models_whose_kv_is_a_function_of_the_prefix_are_taken(build: Any) -> None:
    assert attach(build()).num_layers == 2


def test_a_sliding_window_is_refused() -> None:
    assert "sliding-window" in refusal(sized(t.MistralConfig, sliding_window=64))
    assert "layer 0" in refusal(sized(t.Gemma2Config, head_dim=16))
    assert "sliding-window" in refusal(sized(t.Gemma3TextConfig, head_dim=16))


def test_recurrent_state_is_refused() -> None:
    mamba = made(t.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2))
    assert "recurrent state" in refusal(mamba)
    jamba = sized(
        t.JambaConfig,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_expand=2,
    )
    assert "recurrent state" in refusal(jamba)


def test_an_encoder_decoder_is_refused() -> None:
    config = t.T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    assert "encoder-decoder" in refusal(t.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_rope_that_depends_on_the_total_length_is_refused(rope: dict[str, Any]) -> None:
    assert f"RoPE of type {rope['rope_type']}" in refusal(llama(rope_parameters=rope))


def test_a_rope_type_hidden_in_a_module_is_seen() -> None:
    model = llama()
    model.model.rotary_emb.rope_type = "ntk-by-tomorrow"
    assert "ntk-by-tomorrow" in refusal(model)


def test_shared_kv_between_layers_is_refused() -> None:
    model = llama()
    model.config.kv_sharing_modes = ["store", "reuse"]
    assert "no KV of its own" in refusal(model)


def test_latent_attention_with_unequal_keys_and_values_is_refused_with_the_numbers() -> None:
    model = made(
        t.DeepseekV3Config(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        )
    )
    assert "[1, 1, 24, 8]" in refusal(model)


def test_attention_that_looks_ahead_is_refused_by_what_it_does() -> None:
    config = t.BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.is_decoder = True
    model = t.BertLMHeadModel(config).eval()
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = False
    model.config.is_decoder = False
    assert "depend on what follows" in refusal(model)


def test_a_forward_that_others_intervene_in_is_refused() -> None:
    steered = llama()
    steered.model.layers[1].register_forward_hook(lambda module, args, output: output + 1)
    assert "model.layers.1 has a forward hook" in refusal(steered)
    patched = llama()
    patched.model.layers[0].mlp.forward = lambda x: x
    assert "model.layers.0.mlp has a forward hook, or another forward" in refusal(patched)


def test_an_attention_function_of_others_is_refused_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharper(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query * 3, *args, **options)

    monkeypatch.setitem(t.AttentionInterface._global_mapping, "sharper", sharper)
    model = llama()
    watch = Watch(model)
    model.set_attn_implementation("eager")
    assert not watch.changed()
    model.set_attn_implementation("sharper")
    assert watch.changed()
    assert "sharper" in refusal(model)


def test_a_compiled_forward_and_the_librarys_own_hooks_are_taken() -> None:
    model = llama()
    model.forward = torch.compile(model.forward, backend="eager")
    assert not interventions(model)
    model = llama()
    model(torch.tensor([[3, 4]]), output_hidden_states=True)  # installs hooks that record
    assert attach(model).num_layers == 2


def test_positions_that_do_not_count_from_zero_are_refused() -> None:
    config = t.RobertaConfig(**SIZES, is_decoder=True)
    assert "count token positions from 0" in refusal(t.RobertaForCausalLM(config).eval())


def test_positions_that_padding_moves_are_refused() -> None:
    sizes = {"vocab_size": 128, "d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    decoder = {**sizes, "decoder_layers": 2, "init_std": 0.2, "is_encoder_decoder": False, "is_decoder": True}
    bart = t.BartForCausalLM(t.BartConfig(**decoder, encoder_layers=2)).eval()
    assert "padding before a prompt" in refusal(bart)
    tuned = llama()
    tuned.config.attn_temperature_tuning = True
    assert "which padding moves" in refusal(tuned)


def test_kv_that_leaves_the_cache_it_is_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    update = RoomyLayer.update

    def moving(self: RoomyLayer, *states: torch.Tensor, **options: Any) -> Any:
        keys, values = update(self, *states, **options)
        self.keys, self.values = keys.clone(), values.clone()
        return keys, values

    monkeypatch.setattr(RoomyLayer, "update", moving)
    assert "takes its KV out of the cache" in refusal(llama())


def test_a_model_that_fails_by_itself_is_refused_with_its_error() -> None:
    model = llama()
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(3, 3).eval()
    assert "fails on a few tokens" in refusal(model)
    unfilled = llama()
    unfilled.model.layers = unfilled.model.layers[:1]
    assert "layer 1: a forward leaves its cache empty" in refusal(unfilled)


def test_training_mode_is_refused() -> None:
    assert "model.eval()" in refusal(llama().train())
    partly = llama()
    partly.model.layers[1].self_attn.train()
    assert "model.eval()" in refusal(partly)


def test_a_model_of_another_library_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="not a transformers PreTrainedModel"):
        unwrapped(torch.nn.Linear(2, 2))


def test_weights_that_are_not_loaded_are_refused() -> None:
    with torch.device("meta"):
        model = t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()
    assert "is on meta" in refusal(model)
