"""Part: which slice of a model's KV a frame holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from lmcache_core.identity.encoding import encode
from lmcache_core.identity.keys import PART_DIGEST_CHARS

MAX_NAME_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The layers (pipeline stage), KV heads (tensor rank) and attention group of one frame.

    `content_format` names what the bytes of one token and one head are, dtype and dimensions
    included (`kv float32 64`); `content_nbytes` is how many they are. A chunk is a hit only if every
    part that the engine needs is there.

    Raises:
        ValueError: an empty or negative range, no content bytes, or a name that isn't 1 to 120
            printable ASCII characters.
    """

    layers: tuple[int, int]
    """Half-open: `(0, 30)` is layers 0 to 29."""
    heads: tuple[int, int]
    """Half-open, counted over the whole model, not over this rank."""
    content_format: str
    content_nbytes: int
    group: str = "full"
    """Attention group: `full`, or another kind of state that lives beside it in a hybrid model."""
    digest: str = field(init=False, repr=False, compare=False)
    """16 hex digits over all of the above: the part in a storage key."""

    def __post_init__(self) -> None:
        for name, (first, end) in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= first < end:
                raise ValueError(f"{name} must be a half-open range that isn't empty, not ({first}, {end})")
        if self.content_nbytes < 1:
            raise ValueError(f"content_nbytes must be at least 1, not {self.content_nbytes}")
        for name, text in (("content_format", self.content_format), ("group", self.group)):
            if not (1 <= len(text) <= MAX_NAME_CHARS and text.isascii() and text.isprintable()):
                raise ValueError(
                    f"{name} must be 1 to {MAX_NAME_CHARS} printable ASCII characters, not {text!r}"
                )
        identity = encode([self.layers, self.heads, self.content_format, self.content_nbytes, self.group])
        digest = blake2b(identity, digest_size=PART_DIGEST_CHARS // 2, person=b"lmcache-core p1")
        object.__setattr__(self, "digest", digest.hexdigest())

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    def segment_nbytes(self, num_tokens: int) -> int:
        """Raw bytes of one layer of `num_tokens` tokens: `[heads, tokens, content]`."""
        return self.num_heads * num_tokens * self.content_nbytes
