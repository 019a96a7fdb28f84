"""Paged KV over the caches of a real model."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_kv import (
    DIM,
    HEADS,
    LAYERS,
    expected_numbers,
    new_payload,
    number,
    payload_numbers,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lmcache_core.kernels import PagedKV

pytestmark = pytest.mark.usefixtures("mover")


@pytest.fixture(scope="module")
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=8,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_gather_reads_what_a_dynamic_cache_was_updated_with() -> None:
    """The engine's own cache write, for numbered tokens, in two steps as in prefill and decode."""
    cache = DynamicCache()
    for tokens in (range(6), range(6, 11)):
        for layer in range(LAYERS):
            keys, values = (
                torch.tensor(
                    [
                        [[number(layer, kv, head, t, e) for e in range(DIM)] for head in range(HEADS)]
                        for t in tokens
                    ]
                ).transpose(0, 1)[None]
                for kv in range(2)
            )
            cache.update(keys, values, layer)
    kv = PagedKV.from_pairs([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers])
    payload = new_payload(8)
    kv.gather(range(2, 10), payload)
    assert payload_numbers(payload) == expected_numbers(range(2, 10))


def test_a_cache_filled_by_scatter_continues_a_real_model_as_its_own_cache_does(
    tiny_llama: LlamaForCausalLM,
) -> None:
    tokens = torch.randint(0, 50, [1, 20])
    with torch.inference_mode():
        own = tiny_llama(tokens[:, :16], use_cache=True).past_key_values
        payload = new_payload(16, dim=8)
        PagedKV.from_pairs([x.keys for x in own.layers], [x.values for x in own.layers]).gather(
            range(16), payload
        )
    for layer, memory in enumerate(payload):  # an element at a time, from the model's cache to the payload
        numbers = memory.cast("f")
        for head, token, element in itertools.product(range(HEADS), range(16), range(8)):
            start = (head * 16 + token) * 16 + element
            assert numbers[start] == own.layers[layer].keys[0, head, token, element].item()
            assert numbers[start + 8] == own.layers[layer].values[0, head, token, element].item()
    loaded = DynamicCache()
    for layer in range(LAYERS):
        loaded.update(torch.zeros(1, HEADS, 16, 8), torch.zeros(1, HEADS, 16, 8), layer)
    PagedKV.from_pairs([x.keys for x in loaded.layers], [x.values for x in loaded.layers]).scatter(
        range(16), payload
    )
    with torch.inference_mode():
        want = tiny_llama(tokens[:, 16:], cache=own).logits
        got = tiny_llama(tokens[:, 16:], cache=loaded).logits
    assert torch.equal(got, want)


def test_left_padded_rows_are_read_from_their_own_first_slot(tiny_llama: LlamaForCausalLM) -> None:
    """Position p of a row padded by n tokens lies in slot n + p, and equals the row run alone."""
    long, short = torch.randint(1, 50, [12]), torch.randint(1, 50, [7])
    batch = torch.stack([long, torch.cat([torch.zeros(5, dtype=torch.int64), short])])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    with torch.inference_mode():
        both = tiny_llama(batch, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        alone = tiny_llama(short[None])
    payload = new_payload(7, dim=8)
    layers = both.past_key_values.layers
    PagedKV.from_pairs([x.keys for x in layers], [x.values for x in layers], row=1).gather(
        range(5, 12), payload
    )
    for memory, layer in zip(payload, alone.past_key_values.layers, strict=True):
        got = torch.frombuffer(memory, dtype=torch.float32).view(HEADS, 7, 2, 8)
        torch.testing.assert_close(got[:, :, 0], layer.keys[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[:, :, 1], layer.values[0], rtol=1e-5, atol=1e-5)
