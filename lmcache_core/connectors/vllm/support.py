"""Which vLLM configurations can be served: everything else is refused when the engine starts, by name."""

from __future__ import annotations

from typing import Any

from lmcache_core.connectors.vllm.groups import Group
from lmcache_core.errors import UnsupportedModel

_READ_FROM_THE_MODEL_PATH = frozenset(
    {
        *(
            "auto",
            "hf",
            "safetensors",
            "fastsafetensors",
            "instanttensor",
            "pt",
            "npcache",
            "mistral",
            "gguf",
        ),
        "bitsandbytes",
    }
)
"""Load formats whose weights are the files that are fingerprinted."""

_DRAFTS_WITHOUT_KV = frozenset({"ngram", "suffix"})
_WINDOW = "SlidingWindowSpec"


def check_config(vllm_config: Any) -> None:
    """
    Raises:
        UnsupportedModel: KV that isn't a function of the prefix, the weights and the config alone, or that
            this connector can't tell apart yet; with the reason.
    """
    for refused, reason in _reasons(vllm_config):
        if refused:
            raise UnsupportedModel(f"the LMCacheCore connector can't be used with {reason}")


def attention_specs(kv_cache_config: Any) -> list[Any]:
    """The spec of each attention group.

    Raises:
        UnsupportedModel: a group whose KV isn't that of every token, or of a window's.
    """
    if not kv_cache_config.kv_cache_groups:
        raise UnsupportedModel("a model without KV")
    return [_attention_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]


def attention_groups(kv_cache_config: Any) -> tuple[Group, ...]:
    """What there is to know of each group for planning; raises as `attention_specs`."""
    return tuple(
        Group(spec.block_size, spec.sliding_window if type(spec).__name__ == _WINDOW else None)
        for spec in attention_specs(kv_cache_config)
    )


def _attention_spec(spec: Any) -> Any:
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        inner = list(spec.kv_cache_specs.values())
        if any(each != inner[0] for each in inner):
            raise UnsupportedModel("layers whose KV differs in heads or size")
        spec = inner[0]
    kind = type(spec).__name__
    if kind not in (_WINDOW, "FullAttentionSpec", "MLAAttentionSpec"):
        raise UnsupportedModel(
            f"layers of kind {kind}: only full attention and sliding windows are supported"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedModel("layers that attend to later tokens: their KV is no function of the prefix")
    return spec


def _reasons(vllm_config: Any) -> list[tuple[bool, str]]:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    images = getattr(model, "multimodal_config", None)
    load_format = str(vllm_config.load_config.load_format)
    draft = getattr(vllm_config.speculative_config, "method", None)
    return [
        (
            load_format not in _READ_FROM_THE_MODEL_PATH,
            f"load format {load_format!r}: the weights aren't the files in the model's directory",
        ),
        (bool(getattr(cache, "calculate_kv_scales", False)), "KV scales computed at run time"),
        (
            cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            f"KV of dtype {cache.cache_dtype}: its scales aren't told apart yet",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism: a rank holds only some tokens of a block",
        ),
        (
            draft is not None and draft not in _DRAFTS_WITHOUT_KV,
            f"speculative decoding by {draft!r}: the draft model's KV is not told apart yet",
        ),
        (model.runner_type != "generate", f"the runner {model.runner_type!r}: only generation is cached"),
        (bool(getattr(model, "is_encoder_decoder", False)), "an encoder-decoder"),
        (
            images is not None and not images.language_model_only and not _hashes_images(images, cache),
            (
                "images that have no hash: with mm_processor_cache_gb 0 and without prefix caching vLLM only "
                "numbers them. Leave one of the two on, or set language_model_only"
            ),
        ),
        (
            getattr(images, "mm_encoder_attn_dtype", None) is not None,
            "an encoder of images in fp8: its scales aren't told apart yet",
        ),
    ]


def _hashes_images(images: Any, cache: Any) -> bool:
    return bool(images.mm_processor_cache_gb) or bool(cache.enable_prefix_caching)
