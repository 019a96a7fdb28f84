"""Who is this KV? Model, content and part; from them the keys under which it is stored."""

from __future__ import annotations

from lmcache_core.identity.content import TAIL_UNIT, Content, Extra, HostContent, HostScheme, Tail
from lmcache_core.identity.encoding import Value, encode
from lmcache_core.identity.fingerprint import parameters_fingerprint, weights_fingerprint
from lmcache_core.identity.keys import StorageKey, chunk_key, chunk_keys, record_key, storage_key
from lmcache_core.identity.model import (
    ABSENT,
    FORMAT_VERSION,
    Absent,
    FieldDifference,
    ModelRecord,
    differences,
)
from lmcache_core.identity.names import NamedContent
from lmcache_core.identity.parts import Part
from lmcache_core.identity.tokens import Tokens

__all__ = [
    "ABSENT",
    "FORMAT_VERSION",
    "TAIL_UNIT",
    "Absent",
    "Content",
    "Extra",
    "FieldDifference",
    "HostContent",
    "HostScheme",
    "ModelRecord",
    "NamedContent",
    "Part",
    "StorageKey",
    "Tail",
    "Tokens",
    "Value",
    "chunk_key",
    "chunk_keys",
    "differences",
    "encode",
    "parameters_fingerprint",
    "record_key",
    "storage_key",
    "weights_fingerprint",
]
