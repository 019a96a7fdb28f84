"""What the commands say where a model's folder holds none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.errors import ConfigError

MOST_CHARS = 240


@contextmanager
def loaded_from(folder: Path) -> Iterator[None]:
    """Inside it, Transformers loads a model or tokenizer from `folder`.

    Raises:
        ConfigError: it can't; with the beginning of its reason, on one line.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= MOST_CHARS else f"{reason[:MOST_CHARS]} ..."
        raise ConfigError(
            f"{folder} holds no model with its tokenizer that Transformers can load (config.json, weights, "
            f"tokenizer files, or one .gguf): {reason}"
        ) from error
