"""Token ids as canonical bytes: int32, little-endian, checked without touching a token in Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer


class NumpyArray(Protocol):
    """A numpy array: a buffer at run time, though its type says so only from Python 3.12 on."""

    @property
    def __array_interface__(self) -> object: ...


class Tensor(Protocol):
    """A CPU tensor of torch, which is a buffer through numpy."""

    def numpy(self) -> NumpyArray: ...


Memory: TypeAlias = "Buffer | NumpyArray"
Tokens: TypeAlias = "Memory | Tensor | Sequence[int]"
"""One dimension of int32 or int64 (`array`, numpy, CPU tensor, memoryview), or a sequence of ints."""

TOKEN_NBYTES = 4

_OUT_OF_RANGE = "token ids must be from 0 to 2147483647"
_BLOCK_TOKENS = 8192  # int64 is converted in pieces that stay in cache: 2 to 3 times faster than whole
_FORMATS = {"i": 4, "I": 4, "l": 8, "L": 8, "q": 8, "Q": 8}  # native l is 8 bytes where we run


def token_bytes(tokens: Tokens) -> bytes:
    """A copy of `tokens` as int32-LE. A buffer that isn't contiguous is copied in its logical order.

    128K tokens take 0.1 ms from int32, 1 ms from int64 and 2 ms from a list.

    Raises:
        TypeError: neither a buffer of int32 or int64 nor a sequence of ints (floats, raw bytes, text, …).
        ValueError: an id is negative or doesn't fit int32, or the buffer isn't one-dimensional.
    """
    raw = unchecked_bytes(tokens)
    if not raw[3::4].isascii():  # the highest byte of each id: not ASCII means its sign bit is set
        raise ValueError(_OUT_OF_RANGE)
    return raw


def unchecked_bytes(tokens: Tokens) -> bytes:
    """`token_bytes`, but for the check that no id is negative, which is most of its time."""
    if not isinstance(tokens, (list, tuple)):
        view = _buffer(tokens)
        if view is not None:
            return _from_buffer(view)
        if not isinstance(tokens, Sequence):
            raise TypeError(f"tokens must be a buffer or a sequence of ints, not {type(tokens).__name__}")
    try:
        return array("i", tokens).tobytes()
    except OverflowError:
        raise ValueError(_OUT_OF_RANGE) from None
    except TypeError as error:
        raise TypeError(f"tokens must be ints: {error}") from None


def _buffer(tokens: Tokens) -> memoryview | None:
    to_numpy = getattr(tokens, "numpy", None)  # torch tensors export no buffer, their numpy view does
    try:
        return memoryview(to_numpy() if callable(to_numpy) else tokens)  # type: ignore[arg-type]
    except TypeError:
        return None


def _from_buffer(view: memoryview) -> bytes:
    if view.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not the shape {view.shape}")
    if _FORMATS.get(view.format.lstrip("@=<")) != view.itemsize:
        raise TypeError(f"tokens must be int32 or int64, not a buffer of format {view.format!r}")
    if view.itemsize == TOKEN_NBYTES:
        return view.tobytes()
    return b"".join(_lower_halves(view[i : i + _BLOCK_TOKENS]) for i in range(0, len(view), _BLOCK_TOKENS))


def _lower_halves(view: memoryview) -> bytes:
    halves = array("i", view.tobytes())
    if halves[1::2].tobytes() != bytes(len(view) * TOKEN_NBYTES):
        raise ValueError(_OUT_OF_RANGE)
    return halves[::2].tobytes()
