"""Whose KV it is: the model record and the part of one rank, from vLLM's own configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lmcache_core.connectors.effective import PREFIX_ROPE_TYPES, effective_fields, rope_types
from lmcache_core.connectors.vllm.versions import vllm_version
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import ModelRecord, Part, Value, encode, weights_fingerprint
from lmcache_core.identity.parts import MAX_NAME_CHARS

_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_record(vllm_config: Any, chunk_tokens: int, fingerprint_folder: Path | None) -> ModelRecord:
    """Reads every byte of the weight files, unless they are a hub's or their fingerprint is remembered.

    Raises:
        UnsupportedModel: the weights can't be found, or a config field can't be compared.
    """
    return ModelRecord(
        weights=_weights(vllm_config, fingerprint_folder),
        config=_effective_config(vllm_config),
        chunk_tokens=chunk_tokens,
    )


WHOLE = "full"
"""The group's name where there is one, of full attention."""


def rank_part(
    vllm_config: Any,
    spec: Any,
    layer_names: Sequence[str],
    block_nbytes: int,
    order: str,
    *,
    group: str = WHOLE,
) -> Part:
    """The layers and KV heads that this rank holds. `order` names the order of bytes inside a block.

    The layers of a `group_name` are counted within the group: its name says which of the model's they are.

    Raises:
        UnsupportedModel: layers or heads that can't be placed in the whole model.
    """
    indices = [_layer_index(name) for name in layer_names]
    layers = (indices[0], indices[-1] + 1) if group == WHOLE else (0, len(indices))
    if layers[1] - layers[0] != len(set(indices)) or len(set(indices)) != len(indices):
        raise UnsupportedModel(f"layers {indices} are not one stretch of the model")
    heads, block_tokens = spec.num_kv_heads, spec.block_size
    if block_nbytes % (heads * block_tokens):
        raise UnsupportedModel(
            f"a block of {block_nbytes} bytes can't be shared by {heads} heads of {block_tokens} tokens"
        )
    first = _first_head(vllm_config, heads)
    return Part(
        layers=layers,
        heads=(first, first + heads),
        content_format=f"vllm {vllm_version()} blocks {order} {_name(spec.dtype)} {block_tokens}",
        content_nbytes=block_nbytes // (heads * block_tokens),
        group=group,
    )


def group_name(window: int | None, layer_names: Sequence[str]) -> str:
    """Names one of several attention groups, or one with a window, by its layers."""
    indices = [_layer_index(name) for name in layer_names]
    kind = "full attention" if window is None else f"window {window}"
    name = f"{kind} of layers {','.join(map(str, indices))}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = blake2b(encode(indices), digest_size=16, person=b"lmcache-core g1").hexdigest()
    return f"{kind} of {len(indices)} layers {digest}"


def in_order(layer_names: Sequence[str]) -> list[str]:
    """The names by their layers' place in the model."""
    return sorted(layer_names, key=_layer_index)


def _layer_index(name: str) -> int:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise UnsupportedModel(f"layer {name!r} doesn't say its place in the model")
    return int(numbers[0])


def _first_head(vllm_config: Any, heads: int) -> int:
    """The first KV head of this rank, counted over the whole model. Ranks may hold the same ones."""
    parallel = vllm_config.parallel_config
    total = 1 if vllm_config.model_config.use_mla else vllm_config.model_config.get_total_num_kv_heads()
    place = parallel.rank % parallel.tensor_parallel_size
    first = place * total // parallel.tensor_parallel_size
    if not 0 < heads <= total or first % heads:
        raise UnsupportedModel(
            f"{heads} of {total} KV heads on rank {place} of {parallel.tensor_parallel_size} can't be placed"
        )
    return int(first)


def _weights(vllm_config: Any, fingerprint_folder: Path | None) -> str:
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return weights_fingerprint(path, cache_dir=fingerprint_folder)
    try:
        from huggingface_hub import snapshot_download

        path = Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception as error:  # recorded boundary: a foreign package, with errors of its own
        raise UnsupportedModel(f"the weight files of {model.model} can't be found: {error}") from error
    if _COMMIT.fullmatch(path.name):
        return f"hub:{path.name}"
    return weights_fingerprint(path, cache_dir=fingerprint_folder)


def _effective_config(vllm_config: Any) -> dict[str, Value]:
    model = vllm_config.model_config
    rope = rope_types(model.hf_text_config)
    config = effective_fields({**model.hf_config.to_dict(), **_options(model)}, rope)
    config["architecture"] = str(model.architecture)
    config["compute_dtype"] = _name(model.dtype)
    config["quantization"] = None if model.quantization is None else str(model.quantization)
    load_format = str(vllm_config.load_config.load_format)
    if load_format != "auto":  # one folder may hold several sets of weights
        config["load_format"] = load_format
    if not rope <= PREFIX_ROPE_TYPES:
        # vLLM fixes these frequencies when it starts, by the longest sequence that it will take.
        config["max_model_len"] = int(model.max_model_len)
    return config


def _options(model: Any) -> dict[str, object]:
    """What vLLM is told beside the model's config, where it is told anything.

    vLLM's hash of an image covers neither how the engine has it prepared nor what it keeps of a video.
    """
    options: dict[str, object] = {}
    if (told := getattr(model, "quantization_config", None)) is not None:
        options["quantization_options"] = repr(told)
    images = getattr(model, "multimodal_config", None)
    if images is not None:
        options["mm_processor"] = _processor_files(Path(model.model))
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            options[name] = getattr(images, name, None) or None
        if getattr(images, "video_pruning_rate", None):
            options["video_pruning"] = [images.video_pruning_method, images.video_pruning_rate]
    return options


def _processor_files(folder: Path) -> str | None:
    """A digest of the files that say how images are prepared. A hub's commit covers them."""
    files: list[Value] = [
        [file.name, file.read_bytes()] for file in sorted(folder.glob("*processor_config.json"))
    ]
    return blake2b(encode(files), digest_size=16, person=b"lmcache-core m1").hexdigest() if files else None


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
