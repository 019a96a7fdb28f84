"""The paper's masks: `F…FT…T`, the F part a multiple of the chunk size."""

from __future__ import annotations

from collections.abc import Sequence

_TRUTH = bytes([0, *[1] * 255])


def skipped_tokens(mask: Sequence[bool] | None, num_tokens: int, chunk_tokens: int) -> int:
    """How many tokens the F part of `mask` covers; 0 without a mask.

    Takes any sequence or buffer of truth values: lists, arrays, tensors.

    Raises:
        ValueError: wrong length, a T before an F, or an F part that ends inside a chunk.
    """
    if mask is None:
        return 0
    if isinstance(mask, memoryview) and mask.format == "?" and mask.c_contiguous:
        flags = mask.tobytes().translate(_TRUTH)  # 131,072 tokens: 0.3 ms; one by one 11
    else:
        flags = bytes(bool(flag) for flag in mask)
    if len(flags) != num_tokens:
        raise ValueError(f"a mask of {len(flags)} for {num_tokens} tokens")
    first = flags.find(1)
    skipped = len(flags) if first < 0 else first
    if flags.find(0, skipped) >= 0:
        raise ValueError("a mask must be False up to some token and True from there on")
    if skipped % chunk_tokens:
        raise ValueError(
            f"the mask skips {skipped} tokens, which is no multiple of the chunk size {chunk_tokens}"
        )
    return skipped
