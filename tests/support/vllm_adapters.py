"""LoRA adapters for the tiny Llama of `vllm_session`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, RANK = 3, 128, 8
WIDTHS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}


def save_adapter(folder: Path, *, seed: int) -> Path:
    """An adapter as PEFT saves it, with random weights large enough to change what is said."""
    drawn = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, width in WIDTHS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for half, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (width, RANK))):
                weights[f"{name}.{half}.weight"] = drawn.normal(0, 0.3, shape).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(WIDTHS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
