"""What the commands say where a model's folder holds none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.errors import ConfigError

MOST_CHARS = 240
NO_MODEL = (
    "holds no model with its tokenizer that Transformers can load (config.json, weights, tokenizer files, or "
    "one .gguf)"
)


@contextmanager
def loaded_from(place: Path, fault: str = NO_MODEL) -> Iterator[None]:
    """Inside it, Transformers loads a model or tokenizer from `place`.

    Raises:
        ConfigError: it can't: `place` and `fault`, with the beginning of its reason, on one line.
    """
    try:
        yield
    except (ImportError, MemoryError):  # no fault of the files
        raise
    except Exception as error:  # recorded boundary: what its parsers raise of damaged files is of any class
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= MOST_CHARS else f"{reason[:MOST_CHARS]} ..."
        raise ConfigError(f"{place} {fault}: {reason}") from error
