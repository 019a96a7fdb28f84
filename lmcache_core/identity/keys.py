"""Storage keys: the only names that tiers and backends ever see."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NewType, cast

StorageKey = NewType("StorageKey", str)
"""An opaque name, `[a-z0-9-]{1,120}`: `c-<part>-<hash>` for chunks, `n-<digest>` for records."""

KEY_PATTERN = re.compile(r"[a-z0-9-]{1,120}")
PART_DIGEST_CHARS = 16


def storage_key(text: str) -> StorageKey:
    """Returns `text` as a key.

    Raises:
        ValueError: it does not match `[a-z0-9-]{1,120}`.
    """
    if not KEY_PATTERN.fullmatch(text):
        raise ValueError(f"not a storage key: {text!r} (allowed: 1 to 120 of a-z, 0-9 and '-')")
    return StorageKey(text)


def chunk_key(part_digest: str, chunk_hash: bytes) -> StorageKey:
    """The key of one part of one chunk: `part_digest` is 16 hex digits, `chunk_hash` 32 bytes."""
    return StorageKey(f"c-{part_digest}-{chunk_hash.hex()}")


def record_key(digest: bytes) -> StorageKey:
    """The key of a model record."""
    return StorageKey(f"n-{digest.hex()}")


def chunk_keys(part_digest: str, chunk_hashes: Iterable[bytes]) -> list[StorageKey]:
    """`chunk_key` of many hashes, several times faster."""
    prefix = f"c-{part_digest}-"
    return cast(list[StorageKey], [prefix + chunk_hash.hex() for chunk_hash in chunk_hashes])
