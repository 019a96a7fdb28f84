"""The model level: everything about a model that makes its KV incompatible, as a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from types import MappingProxyType

from lmcache_core.identity.encoding import Value, encode
from lmcache_core.identity.keys import StorageKey, record_key

FORMAT_VERSION = 1
"""Version of keys, frames and payload order together: a change of it makes everything stored a miss."""

MAX_CHUNK_TOKENS = 1 << 20
MAX_RECORD_NBYTES = 1 << 20
MAX_INT_BITS = 256
MAX_WEIGHTS_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelRecord:
    """What makes two caches of the same tokens different before any token is read.

    It is stored beside the KV (under `key`), so that a cache can be inspected and a miss explained.
    Deeply immutable; equal when the digests are; pickles as its JSON.

    Raises:
        TypeError: `config` holds something that is no None, bool, int, float, str, list or dict.
        ValueError: a field is out of its range, or the record would be too large or deep to store.
    """

    weights: str
    """Fingerprint of the weights: 64 hex digits, or `hub:<commit>`."""
    config: Mapping[str, Value] = field(repr=False)
    """The *effective* config, that is as the engine runs it: RoPE parameters, weight quantisation,
    compute dtype, maximum length where RoPE reads it. Copied and made immutable here."""
    chunk_tokens: int
    format_version: int = FORMAT_VERSION
    digest: bytes = field(init=False, repr=False)
    """BLAKE2b-256 over the canonical encoding of all of the above."""

    def __post_init__(self) -> None:
        if not isinstance(self.weights, str) or not 1 <= len(self.weights) <= MAX_WEIGHTS_CHARS:
            raise ValueError(f"weights must be a fingerprint of 1 to {MAX_WEIGHTS_CHARS} characters")
        if not isinstance(self.config, Mapping):
            raise TypeError(f"config must be a mapping, not {type(self.config).__name__}")
        for name, number, most in (
            ("chunk_tokens", self.chunk_tokens, MAX_CHUNK_TOKENS),
            ("format_version", self.format_version, 1 << 31),
        ):
            if type(number) is not int or not 1 <= number <= most:
                raise ValueError(f"{name} must be an int from 1 to {most}, not {number!r}")
        encode(self.config)  # refuses foreign types, odd keys, broken Unicode and depth before the copy
        object.__setattr__(self, "config", _frozen(self.config, "config"))
        identity = encode(self._fields())
        object.__setattr__(
            self, "digest", blake2b(identity, digest_size=32, person=b"lmcache-core n1").digest()
        )
        nbytes = len(self.to_json())
        if nbytes > MAX_RECORD_NBYTES:
            raise ValueError(f"the record takes {nbytes} bytes; at most {MAX_RECORD_NBYTES} can be stored")

    @property
    def key(self) -> StorageKey:
        """Where this record is stored."""
        return record_key(self.digest)

    def to_json(self) -> bytes:
        """The record as readable, canonical JSON (sorted, indented, ASCII; floats as Python writes them)."""
        return json.dumps(self._fields(), indent=2, sort_keys=True, default=dict).encode()

    @classmethod
    def from_json(cls, stored: bytes) -> ModelRecord:
        """The record that `to_json` wrote.

        Raises:
            ValueError: these bytes, whatever they are, are not exactly what `to_json` writes.
        """
        if len(stored) > MAX_RECORD_NBYTES:
            raise ValueError(f"not a model record: {len(stored)} bytes")
        try:
            fields = json.loads(stored.decode())
            if not isinstance(fields, dict) or fields.keys() != {*_FIELDS}:
                raise ValueError("its fields are not those of a record")
            record = cls(**fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"not a model record: {error}") from error
        if record.to_json() != stored:
            raise ValueError("not a model record: not the canonical form")
        return record

    def _fields(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __eq__(self, other: object) -> bool:
        # By digest, because `1 == True == 1.0` would call configs equal that have different keys.
        return self.digest == other.digest if isinstance(other, ModelRecord) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return (ModelRecord.from_json, (self.to_json(),))


_FIELDS = ("chunk_tokens", "config", "format_version", "weights")


class Absent(Enum):
    """Stands for a field that one record doesn't have (None is a value that a config may hold)."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDifference:
    """One field in which two records differ: `config.rope_theta`, `config.layers[3]`, `weights`, …"""

    field: str
    ours: Value | Absent
    theirs: Value | Absent

    def __str__(self) -> str:
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} there"


def differences(ours: ModelRecord, theirs: ModelRecord) -> tuple[FieldDifference, ...]:
    """Every field in which the records differ, in a fixed order. Empty exactly if the digests are equal."""
    return tuple(
        difference
        for name in ("format_version", "weights", "chunk_tokens", "config")
        for difference in _differences(name, getattr(ours, name), getattr(theirs, name))
    )


def _differences(name: str, ours: Value | Absent, theirs: Value | Absent) -> Iterator[FieldDifference]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            inner = f"{name}.{key}" if key.isidentifier() else f"{name}[{json.dumps(key)}]"
            yield from _differences(inner, ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif isinstance(ours, tuple) and isinstance(theirs, tuple):
        for i in range(max(len(ours), len(theirs))):
            mine = ours[i] if i < len(ours) else ABSENT
            other = theirs[i] if i < len(theirs) else ABSENT
            yield from _differences(f"{name}[{i}]", mine, other)
    elif isinstance(ours, Absent) or isinstance(theirs, Absent) or encode(ours) != encode(theirs):
        yield FieldDifference(field=name, ours=ours, theirs=theirs)


def _frozen(value: Value, where: str) -> Value:
    """An immutable copy in plain types: subclasses (enums, numpy floats) become what they encode to."""
    match value:
        case None | bool():
            return value
        case int():
            if value.bit_length() > MAX_INT_BITS:
                raise ValueError(f"{where} has more than {MAX_INT_BITS} bits")
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case list() | tuple():
            return tuple(_frozen(item, f"{where}[{i}]") for i, item in enumerate(value))
        case Mapping():
            return MappingProxyType(
                {str.__str__(key): _frozen(value[key], f"{where}.{key}") for key in sorted(value)}
            )
        case _:
            raise TypeError(f"{where} is {type(value).__name__}, which a record can't hold; use hex text")
