"""How a value lies on the server: one hash with a small field that describes it, and its pieces.

Field `m` is the description, fields `0`, `1`, … are the pieces, each with the version of its put before
it. So a reader of several pieces proves that they are of one put, and the server evicts, expires and
deletes the value as a whole.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_core.sdk import ByteSize, StorageKey, storage_key

VERSION_NBYTES = 16
META = b"m"
_FORMAT = 1
_HEAD = struct.Struct("<B16sQII")  # format, version, nbytes, piece nbytes, number of pieces
LEAST_PIECE = ByteSize("64KiB")
LARGEST_PIECE = ByteSize("64MiB")


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one namespace. What stands in braces decides a key's slot in a cluster."""

    namespace: str

    def value(self, key: StorageKey) -> bytes:
        return b"%b:{%b}" % (self.namespace.encode(), key.encode())

    def temporary(self, key: StorageKey, version: bytes) -> bytes:
        return b"%b.tmp:{%b}%b" % (self.namespace.encode(), key.encode(), version.hex().encode())

    @property
    def pins(self) -> bytes:
        return b"%b.pins" % self.namespace.encode()

    def key_of(self, name: bytes) -> StorageKey | None:
        """The key whose value is called `name`; None where that is no value of ours."""
        head = b"%b:{" % self.namespace.encode()
        if not (name.startswith(head) and name.endswith(b"}")):
            return None
        return _key(name[len(head) : -1])


class Meta(NamedTuple):
    """What a value's field `m` says."""

    version: bytes
    nbytes: int
    piece_nbytes: int
    num_pieces: int
    parent_text: bytes

    @classmethod
    def of(cls, version: bytes, nbytes: int, piece_nbytes: int, parent: StorageKey | None) -> Meta:
        return cls(version, nbytes, piece_nbytes, -(-nbytes // piece_nbytes), (parent or "").encode())

    @property
    def parent(self) -> StorageKey | None:
        """The key this value's tokens follow, if one was given."""
        return _key(self.parent_text)

    def encode(self) -> bytes:
        head = _HEAD.pack(_FORMAT, self.version, self.nbytes, self.piece_nbytes, self.num_pieces)
        return head + self.parent_text

    @classmethod
    def decode(cls, text: bytes) -> Meta | None:
        """None where `text` isn't what `encode` makes: another format, or damaged."""
        if len(text) < _HEAD.size:
            return None
        format_, version, nbytes, piece_nbytes, num_pieces = _HEAD.unpack_from(text)
        sound = (
            format_ == _FORMAT
            and nbytes
            and LEAST_PIECE <= piece_nbytes <= LARGEST_PIECE
            and num_pieces == -(-nbytes // piece_nbytes)
        )
        return cls(version, nbytes, piece_nbytes, num_pieces, text[_HEAD.size :]) if sound else None

    def piece(self, index: int) -> tuple[int, int]:
        """Offset and length of piece `index`."""
        offset = index * self.piece_nbytes
        return offset, min(self.piece_nbytes, self.nbytes - offset)


def field(index: int) -> bytes:
    """The field of piece `index`."""
    return b"%d" % index


def _key(text: bytes) -> StorageKey | None:
    try:
        return storage_key(text.decode("ascii"))
    except ValueError:
        return None
