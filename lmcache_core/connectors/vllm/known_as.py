"""What an engine's KV is known by: lines in vLLM's log, which `lmcache-core explain` reads.

Nothing else says all of it: which layers and heads a rank has and how its attention orders the bytes in a
block is known only to a running vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from lmcache_core.connectors.vllm.groups import Group, common_block_tokens
from lmcache_core.errors import ConfigError
from lmcache_core.identity import FieldDifference, ModelRecord, Part, encode

log = logging.getLogger("vllm.lmcache_core")
"""A child of vLLM's own: what it says is shown where vLLM's lines are. Without vLLM it goes nowhere."""

MARK = "KV is known by "
MAX_LINE_CHARS = 1 << 20

_WEIGHTS = "the model, or --revision"
_FLAGS: Mapping[str, str] = {
    "weights": _WEIGHTS,
    "chunk_tokens": "chunk_tokens in the cache's config, --block-size",
    "config.architecture": _WEIGHTS,
    "config.compute_dtype": "--dtype",
    "config.quantization": "--quantization",
    "config.quantization_options": "--quantization-config",
    "config.mm_processor": "the model's *processor_config.json",
    "config.mm_processor_kwargs": "--mm-processor-kwargs",
    "config.media_io_kwargs": "--media-io-kwargs",
    "config.video_pruning": "--video-pruning-rate, --video-pruning-method",
    "config.load_format": "--load-format",
    "config.max_model_len": "--max-model-len, which this kind of RoPE reads",
    "part.content_format": "vLLM's version, instruction set or attention backend, --dtype, --block-size",
    "part.num_layers": "--pipeline-parallel-size, or other attention groups",
    "part.token_nbytes": "--tensor-parallel-size, --dtype",
}


class Slice(msgspec.Struct, frozen=True):
    """One attention group of a rank."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    content_format: str
    content_nbytes: int
    group: str
    block_tokens: int
    window: int | None

    def read(self) -> tuple[Part, Group]:
        """
        Raises:
            ValueError: there can be no such part.
        """
        part = Part(
            layers=self.layers,
            heads=self.heads,
            content_format=self.content_format,
            content_nbytes=self.content_nbytes,
            group=self.group,
        )
        return part, Group(self.block_tokens, self.window)


class RankLine(msgspec.Struct, frozen=True, tag="rank"):
    """A rank has started."""

    engine: str
    """The same for all ranks of one start."""
    rank: int
    model: dict[str, Any]
    """A model record's fields."""
    slices: list[Slice]


class EpochLine(msgspec.Struct, frozen=True, tag="epoch"):
    """The cache was reset: from now on requests are known by this, too."""

    epoch: str


class AdapterLine(msgspec.Struct, frozen=True, tag="adapter"):
    """An adapter was seen first."""

    name: str
    fingerprint: str


def tell_rank(
    engine_id: str, rank: int, model: ModelRecord, parts: Sequence[Part], groups: Sequence[Group]
) -> None:
    slices = [
        Slice(
            layers=part.layers,
            heads=part.heads,
            content_format=part.content_format,
            content_nbytes=part.content_nbytes,
            group=part.group,
            block_tokens=group.block_tokens,
            window=group.window,
        )
        for part, group in zip(parts, groups, strict=True)
    ]
    _tell(RankLine(engine_id, rank, msgspec.json.decode(model.to_json()), slices))


def tell_epoch(epoch: bytes) -> None:
    _tell(EpochLine(epoch.hex()))


def tell_adapter(name: str, fingerprint: bytes) -> None:
    _tell(AdapterLine(name, fingerprint.hex()))


def in_epoch(lora: bytes, epoch: bytes) -> bytes:
    """What stands for an adapter (or none, when empty) since the cache was reset; at first, the adapter."""
    return (
        blake2b(encode([epoch, lora]), digest_size=32, person=b"lmcache-core e1").digest() if epoch else lora
    )


@dataclass(slots=True)
class KnownAs:
    """What a log says of the engine that was started last."""

    model: ModelRecord
    ranks: dict[int, list[tuple[Part, Group]]] = field(default_factory=dict)
    """Each rank's attention groups."""
    epochs: list[bytes] = field(default_factory=lambda: [b""])
    """The last one is in force."""
    adapters: dict[str, list[bytes]] = field(default_factory=dict)
    """By name; of adapters that had the same one, the last is in force."""

    def starts(self, rank: int) -> dict[str, Callable[[int], int]]:
        """Digest of each part with a window → from which token on a hit of so many needs it."""
        size = self.model.chunk_tokens
        return {
            part.digest: partial(group.skipped, chunk_tokens=size)
            for part, group in self.ranks[rank]
            if group.window is not None
        }

    @property
    def block_tokens(self) -> int:
        """What every prefix that vLLM takes is a multiple of."""
        return common_block_tokens([group for rank in self.ranks.values() for _, group in rank])

    def lora(self, adapter: str | None) -> bytes:
        """What requests with this adapter are known by now.

        Raises:
            ConfigError: the engine has seen no such adapter.
        """
        if adapter is not None and adapter not in self.adapters:
            seen = ", ".join(sorted(self.adapters)) or "none"
            raise ConfigError(f"no request with adapter {adapter!r} was cached; adapters seen: {seen}")
        return in_epoch(b"" if adapter is None else self.adapters[adapter][-1], self.epochs[-1])

    def otherwise(self, adapter: str | None, salt: bytes) -> dict[str, tuple[bytes, bytes]]:
        """What else the same tokens may be stored under, in vLLM's words → (LoRA, salt)."""
        names = [None, *self.adapters]
        tried = {
            "no lora_request" if name is None else f"lora_request {name!r}": (self.lora(name), salt)
            for name in names
            if name != adapter
        }
        if salt:
            tried["no cache_salt"] = (self.lora(adapter), b"")
        for fingerprint in [] if adapter is None else self.adapters[adapter][:-1]:
            tried[f"other files of lora_request {adapter!r}"] = (
                in_epoch(fingerprint, self.epochs[-1]),
                salt,
            )
        own = b"" if adapter is None else self.adapters[adapter][-1]
        for i, epoch in enumerate(self.epochs[:-1], 1):
            tried[f"the epoch before reset {i} of the cache"] = (in_epoch(own, epoch), salt)
        return tried


def read_log(file: Path) -> KnownAs:
    """
    Raises:
        ConfigError: no engine says in this file what its KV is known by.
    """
    decoder = msgspec.json.Decoder(RankLine | EpochLine | AdapterLine)
    known: KnownAs | None = None
    engine = ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        while text := lines.readline(MAX_LINE_CHARS):
            _, mark, said = text.partition(MARK)
            if not mark:
                continue
            try:
                match decoder.decode(said.strip()):
                    case RankLine() as line:
                        model, rank = ModelRecord(**line.model), [each.read() for each in line.slices]
                        if known is None or line.engine != engine:
                            known, engine = KnownAs(model), line.engine
                        known.ranks[line.rank] = rank
                    case EpochLine(epoch) if known is not None:
                        known.epochs.append(bytes.fromhex(epoch))
                    case AdapterLine(name, fingerprint) if known is not None:
                        known.adapters.setdefault(name, []).append(bytes.fromhex(fingerprint))
            except (msgspec.MsgspecError, ValueError, TypeError):
                continue  # cut off, mixed with another line, or not ours
    if known is None:
        raise ConfigError(
            f"{file} doesn't say what the KV of an engine is known by: it must be what a vLLM with this "
            "connector printed, from its start on, at log level INFO (vLLM's default)"
        )
    return known


def in_vllm_s_words(difference: FieldDifference) -> str:
    """The options of vLLM that a field follows from; empty for those that are the model's own."""
    field = difference.field
    while field and field not in _FLAGS:
        field = field.rpartition(".")[0]  # an option may hold others
    return _FLAGS.get(field, "")


def _tell(line: RankLine | EpochLine | AdapterLine) -> None:
    log.info("%s%s", MARK, msgspec.json.encode(line).decode())
