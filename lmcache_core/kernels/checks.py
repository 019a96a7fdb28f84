"""What slots and payloads must be, and what is said where they are not. Nothing was moved then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bad_slot(frame: int, token: int, slot: int, num_slots: int) -> ValueError:
    return ValueError(
        f"token {token} of frame {frame}: slot {slot} is not among {num_slots}, nor -1 (a hole)"
    )


def slot_twice(frame: int, token: int, slot: int) -> ValueError:
    return ValueError(f"token {token} of frame {frame}: slot {slot} is named twice")


def bad_segment(frame: int, layer: int, nbytes: int, memory: memoryview, *, written: bool) -> ValueError:
    wanted = "contiguous writable bytes" if written else "contiguous bytes"
    return ValueError(
        f"payload segment {layer} of frame {frame} must be {nbytes} {wanted}, not {memory.nbytes} "
        f"(read-only: {memory.readonly})"
    )


def overlap(frame: int, layer: int, *, engine: bool) -> ValueError:
    other = "the engine's own memory" if engine else "another one"
    return ValueError(f"payload segment {layer} of frame {frame} overlaps {other}")


def check_range(slots: range, num_slots: int) -> None:
    if slots.step != 1 or not 0 <= slots.start < slots.stop <= num_slots:
        raise ValueError(f"{slots} is not a range of consecutive slots among {num_slots}")


def check_index(slots: Tensor) -> None:
    if str(slots.dtype) not in ("torch.int32", "torch.int64") or slots.dim() != 1 or not slots.numel():
        raise ValueError(f"slots must be 1-D int32 or int64, not {slots.dtype} {list(slots.shape)}")
    if not slots.is_cpu:
        raise ValueError(f"slots are on {slots.device}, the KV on cpu")


def check_layers(frame: int, payload: Sequence[memoryview], num_layers: int) -> None:
    if len(payload) != num_layers:
        raise ValueError(f"{len(payload)} payload segments for {num_layers} layers in frame {frame}")
