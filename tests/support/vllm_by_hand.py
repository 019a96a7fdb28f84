"""vLLM's configuration as far as the connector reads it, made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Config(SimpleNamespace):
    """A Hugging Face config."""

    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))


def vllm_config(folder: Path | str = "/model", **changes: Any) -> Any:
    hf = Config(
        hidden_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=99,
    )
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        hf_config=hf,
        hf_text_config=hf,
        architecture="LlamaForCausalLM",
        dtype="torch.bfloat16",
        quantization=None,
        max_model_len=4096,
        runner_type="generate",
        is_encoder_decoder=False,
        use_mla=False,
        get_total_num_kv_heads=lambda: 8,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(
            rank=0,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
    )
    for path, value in changes.items():
        owner, _, field = path.rpartition("__")
        setattr(getattr(config, owner) if owner else config, field, value)
    return config
