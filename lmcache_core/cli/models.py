"""What the commands say where a model's folder holds none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.errors import ConfigError


@contextmanager
def loaded_from(folder: Path) -> Iterator[None]:
    """Inside it, Transformers loads a model or tokenizer from `folder`.

    Raises:
        ConfigError: it can't; with the first line of its reason.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{folder} holds no model with its tokenizer that Transformers can load (config.json, weights, "
            f"tokenizer files, or one .gguf): {reason}"
        ) from error
