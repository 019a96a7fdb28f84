"""The content level: one request's tokens as chained chunk hashes, computed once and incrementally.

    root = BLAKE2b-256(encode([model digest, LoRA fingerprint, keyed(salt), host scheme or None]))
    keyed(salt) = BLAKE2b-256("root", key = BLAKE2b-512(salt)), or nothing without a salt
    h_i  = BLAKE2b-256(h_(i-1) | u32 n | n int32 tokens | extras)     with h_(-1) = root
    extra = u32 offset in the chunk | u32 length | kind | u32 length | value      (all little-endian)

No process seed, no `hash()`, no pickle: equal in every process, engine and version.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lmcache_core.identity.encoding import encode
from lmcache_core.identity.keys import StorageKey, chunk_key, chunk_keys
from lmcache_core.identity.model import ModelRecord
from lmcache_core.identity.parts import Part
from lmcache_core.identity.tokens import TOKEN_NBYTES, Tokens, token_bytes

TAIL_UNIT = 16
"""A tail (the tokens after the last whole chunk) is named at multiples of this many tokens."""

HASH_NBYTES = 32
MIN_HOST_DIGEST_NBYTES = 16
"""Shorter host hashes (Python's `hash`, xxh64) meet by chance or can be made to: wrong KV."""

_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """Something at a token position that its id doesn't say, such as which image stands there.

    It enters the hash of the chunk or tail that holds token `offset` (counted from the request's
    start), and so all that follow.
    """

    offset: int
    kind: str
    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tail:
    """A name for fewer tokens than a chunk: `num_tokens` (a multiple of 16) from `first_token` on."""

    key: StorageKey
    first_token: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.first_token + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HostScheme:
    """How a host engine chains its block hashes. `seed` None: drawn at random by each process."""

    algorithm: str
    seed: str | None
    block_tokens: int


class Content:
    """One request's tokens under one model, LoRA and salt: their chunk hashes and storage keys.

    The salt is a secret that isolates tenants: it is not kept, only what is derived from it. (A salt
    that can be guessed can be tested by whoever sees keys.) `extend` is for one thread at a time;
    everything else may be read from any thread meanwhile.
    """

    __slots__ = ("_buffer", "_extras", "_hashes", "_keys", "_num_tokens", "model", "root", "salt_tag")

    model: ModelRecord
    root: bytes
    """h_(-1): what the first chunk is chained to, 32 bytes."""
    salt_tag: str
    """64 bits derived from the salt, as 16 hex digits, for quotas; the same under every model. Empty
    without a salt."""

    def __init__(self, model: ModelRecord, *, lora: bytes = b"", salt: bytes = b"") -> None:
        self._start(model, lora, salt, None)

    def _start(self, model: ModelRecord, lora: bytes, salt: bytes, scheme: HostScheme | None) -> None:
        if not isinstance(lora, bytes) or not isinstance(salt, bytes):
            raise TypeError("lora and salt must be bytes")  # and never shown
        self.model = model
        self.salt_tag = _keyed(salt, b"quota tag", 8).hex() if salt else ""
        keyed = _keyed(salt, b"root", HASH_NBYTES) if salt else b""
        host = [scheme.algorithm, scheme.seed, scheme.block_tokens] if scheme is not None else None
        identity = encode([model.digest, lora, keyed, host])
        self.root = blake2b(identity, digest_size=HASH_NBYTES, person=b"lmcache-core c1").digest()
        self._buffer = bytearray()  # replaced when full, never resized: `tokens` views stay valid
        self._num_tokens = 0
        self._extras: list[Extra] = []  # sorted
        self._hashes: list[bytes] = []  # only ever appended to
        self._keys: dict[str, list[StorageKey]] = {}  # by part digest; lists are replaced, never changed

    @staticmethod
    def from_host(
        model: ModelRecord,
        scheme: HostScheme,
        digests: Iterable[bytes],
        *,
        lora: bytes = b"",
        salt: bytes = b"",
    ) -> HostContent:
        """The content of a request whose host engine brings a chained hash for each of its blocks.

        Raises:
            ValueError: a chunk is no multiple of the host's blocks, or a digest is shorter than 16
                bytes (two prefixes might share it).
        """
        content = HostContent(model, scheme, lora=lora, salt=salt)
        content.extend_digests(digests)
        return content

    @property
    def tail_unit(self) -> int:
        return TAIL_UNIT

    @property
    def persistent(self) -> bool:
        """Whether another process can name the same content. If not, no persistent tier may hold it."""
        return not self.not_persistent_reason

    @property
    def not_persistent_reason(self) -> str:
        """Why `persistent` is false; empty if it is true."""
        return ""

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_chunks(self) -> int:
        """Whole chunks."""
        return len(self._hashes)

    @property
    def hashes(self) -> list[bytes]:
        """A copy of the whole chunks' hashes, 32 bytes each."""
        return list(self._hashes)

    @property
    def tokens(self) -> memoryview:
        """The tokens so far, int32, read-only; later `extend`s don't disturb it."""
        num_tokens, buffer = self._num_tokens, self._buffer
        return memoryview(buffer)[: num_tokens * TOKEN_NBYTES].toreadonly().cast("i")

    def extend(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> None:
        """Appends `tokens`, which are copied; `extras` must lie in them, in any order.

        The same hashes come out however a request is split. Nothing changes if it raises.

        Raises:
            TypeError: tokens that aren't ints (int32 and int64 buffers, sequences), or an odd extra.
            ValueError: an id outside int32 or negative, more than one dimension, or an extra whose
                offset isn't one of these tokens (earlier ones may be named already).
        """
        raw = token_bytes(tokens)
        first = self._num_tokens
        end = first + len(raw) // TOKEN_NBYTES
        for extra in extras:
            if not (type(extra.offset) is int and type(extra.kind) is str and type(extra.value) is bytes):
                raise TypeError(f"an extra needs an int offset, a str kind and a bytes value: {extra!r}")
            extra.kind.encode()  # refuses broken Unicode before anything changes
            if not first <= extra.offset < end:
                raise ValueError(f"extra at token {extra.offset}: these tokens are {first} to {end - 1}")
        self._append(raw, end)
        self._extras.extend(sorted(extras))
        self._num_tokens = end
        size, known = self.model.chunk_tokens, len(self._hashes)
        previous = self._hashes[-1] if known else self.root
        self._hashes += self._chain(previous, known * size, size, end // size - known)

    def chunk(self, i: int) -> tuple[int, int]:
        """(first token, number of tokens) of whole chunk `i`.

        Raises:
            IndexError: there is no such whole chunk yet.
        """
        if not 0 <= i < self.num_chunks:
            raise IndexError(f"chunk {i} of {self.num_chunks}")
        return i * self.model.chunk_tokens, self.model.chunk_tokens

    def keys(self, part: Part) -> list[StorageKey]:
        """A copy of the whole chunks' keys for `part`, first chunk first."""
        known = self._keys.get(part.digest, [])
        hashes = self._hashes[len(known) :]
        if hashes:
            known = [*known, *chunk_keys(part.digest, hashes)]
            self._keys[part.digest] = known
        return known.copy()

    def tails(self, part: Part) -> list[Tail]:
        """The names of what follows the last whole chunk, longest first: what a store may write and a
        lookup may probe. At most `chunk_tokens / 16 - 1`, rounded up."""
        return self.tails_after(part, self.num_chunks)

    def tails_after(self, part: Part, num_chunks: int) -> list[Tail]:
        """The tails that start after the first `num_chunks` whole chunks, longest first, all shorter
        than a chunk: what a lookup probes where the whole chunks it found end.

        Raises:
            IndexError: there aren't that many whole chunks.
        """
        first = num_chunks * self.model.chunk_tokens
        return [
            Tail(chunk_key(part.digest, tail_hash), first, count)
            for count, tail_hash in self.tail_hashes_after(num_chunks)
        ]

    def tail_hashes_after(self, num_chunks: int) -> list[tuple[int, bytes]]:
        """(number of tokens, hash) of each tail of `tails_after`, whatever the part."""
        if not 0 <= num_chunks <= self.num_chunks:
            raise IndexError(f"{num_chunks} whole chunks of {self.num_chunks}")
        previous = self._hashes[num_chunks - 1] if num_chunks else self.root
        first = num_chunks * self.model.chunk_tokens
        longest = min(self._num_tokens - first, self.model.chunk_tokens - 1)
        return [
            (count, self._hash(previous, first, count))
            for count in range(longest - longest % TAIL_UNIT, 0, -TAIL_UNIT)
            if self._nameable(first + count)
        ]

    def _append(self, raw: bytes, num_tokens: int) -> None:
        start, end = self._num_tokens * TOKEN_NBYTES, num_tokens * TOKEN_NBYTES
        if end > len(self._buffer):
            grown = bytearray(max(end, 2 * start))
            grown[:start] = memoryview(self._buffer)[:start]
            self._buffer = grown
        self._buffer[start:end] = raw

    def _hash(self, previous: bytes, first: int, count: int) -> bytes:
        return self._chain(previous, first, count, 1)[0]

    def _chain(self, previous: bytes, first: int, count: int, num_links: int) -> list[bytes]:
        """The hashes of `num_links` runs of `count` tokens from `first` on, each over the one before it."""
        tokens, length, hashes = memoryview(self._buffer), _U32.pack(count), []
        for start in range(first, first + num_links * count, count):
            end = start + count
            preimage = previous + length + tokens[start * TOKEN_NBYTES : end * TOKEN_NBYTES]
            if self._extras:
                preimage += self._extras_bytes(start, end)
            previous = blake2b(preimage, digest_size=HASH_NBYTES).digest()
            hashes.append(previous)
        return hashes

    def _extras_bytes(self, first: int, end: int) -> bytes:
        low = bisect_left(self._extras, first, key=_offset)
        high = bisect_left(self._extras, end, low, key=_offset)
        return b"".join(
            _U32.pack(number) + text
            for extra in self._extras[low:high]
            for number, text in (
                (extra.offset - first, b""),
                (len(extra.kind.encode()), extra.kind.encode()),
                (len(extra.value), extra.value),
            )
        )

    def _nameable(self, num_tokens: int) -> bool:
        """Whether a tail may end after `num_tokens` tokens."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_tokens} tokens, {self.num_chunks} whole chunks)"


class HostContent(Content):
    """Content named by a host engine's chained block hashes instead of by tokens, which it doesn't have.

    h = BLAKE2b-256(root | u32 n | digest of the last block): the host's hash says the whole prefix.
    """

    __slots__ = ("_digests", "scheme")

    def __init__(
        self, model: ModelRecord, scheme: HostScheme, *, lora: bytes = b"", salt: bytes = b""
    ) -> None:
        if scheme.block_tokens < 1 or model.chunk_tokens % scheme.block_tokens:
            raise ValueError(
                f"a chunk of {model.chunk_tokens} tokens is no multiple of the host's block of "
                f"{scheme.block_tokens}"
            )
        self._start(model, lora, salt, scheme)
        self.scheme = scheme
        self._digests: list[bytes] = []

    @property
    def not_persistent_reason(self) -> str:
        if self.scheme.seed is not None:
            return ""
        return (
            f"the host's block hashes ({self.scheme.algorithm}) start from a random seed in every process, "
            "so nothing stored could be found again; give the host a fixed seed (for vLLM: PYTHONHASHSEED)"
        )

    @property
    def tokens(self) -> memoryview:
        raise TypeError("content named by a host's hashes has no tokens")

    def extend(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> None:
        raise TypeError("content named by a host's hashes grows by extend_digests")

    def extend_digests(self, digests: Iterable[bytes]) -> None:
        """Appends the hashes of the blocks that follow. Nothing changes if it raises.

        Raises:
            TypeError: a digest isn't bytes.
            ValueError: a digest is shorter than 16 bytes.
        """
        added = list(digests)
        for digest in added:
            if not isinstance(digest, bytes):
                raise TypeError(f"a host's digest must be bytes, not {type(digest).__name__}")
            if len(digest) < MIN_HOST_DIGEST_NBYTES:
                raise ValueError(
                    f"a digest of {len(digest)} bytes can belong to two prefixes; the host must hash to at "
                    f"least {MIN_HOST_DIGEST_NBYTES} (vLLM: prefix_caching_hash_algo=sha256)"
                )
        self._digests += added
        self._num_tokens = len(self._digests) * self.scheme.block_tokens
        size = self.model.chunk_tokens
        for start in range(len(self._hashes) * size, self._num_tokens - size + 1, size):
            self._hashes.append(self._hash(self.root, start, size))

    def _hash(self, previous: bytes, first: int, count: int) -> bytes:
        digest = self._digests[(first + count) // self.scheme.block_tokens - 1]
        return blake2b(self.root + _U32.pack(count) + digest, digest_size=HASH_NBYTES).digest()

    def _nameable(self, num_tokens: int) -> bool:
        return num_tokens % self.scheme.block_tokens == 0


def _keyed(salt: bytes, purpose: bytes, nbytes: int) -> bytes:
    """What stands for the salt: one purpose's bytes tell nothing about another's."""
    return blake2b(purpose, digest_size=nbytes, key=blake2b(salt).digest()).digest()


def _offset(extra: Extra) -> int:
    return extra.offset
