"""What slots and payloads must be, and what is said where they are not. Nothing was moved then."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


HOLE = -1


def bad_slot(frame: int, token: int, slot: int, num_slots: int) -> ValueError:
    return ValueError(
        f"token {token} of frame {frame}: slot {slot} is not among {num_slots}, nor -1 (a hole)"
    )


def slot_twice(frame: int, token: int, slot: int) -> ValueError:
    return ValueError(f"token {token} of frame {frame}: slot {slot} is named twice")


def bad_segment(
    frame: int, layer: int, nbytes: int, segment: memoryview | bytearray, *, written: bool
) -> ValueError:
    memory = memoryview(segment)
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


def bytes_missing(tensor: Tensor) -> str:
    """What is said of a tensor that has less memory than its strides reach; else nothing."""
    last = tensor.numel() - 1
    if last < 0:
        return ""
    if not tensor.is_contiguous():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    wanted = (tensor.storage_offset() + last + 1) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if wanted <= there:
        return ""
    return f"of shape {list(tensor.shape)} reaches to byte {wanted} of a storage of {there}"


def check_index(slots: Tensor) -> None:
    import torch

    if not isinstance(slots, torch.Tensor) or slots.layout != torch.strided:
        what = str(slots.layout) if isinstance(slots, torch.Tensor) else type(slots).__name__
        raise ValueError(f"slots must be a range or a dense tensor, not {what}")
    if slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1 or not slots.numel():
        raise ValueError(f"slots must be 1-D int32 or int64, not {slots.dtype} {list(slots.shape)}")
    if not slots.is_cpu:
        raise ValueError(f"slots are on {slots.device}; they are checked on the host, give them there")
    missing = bytes_missing(slots)
    if missing:
        raise ValueError(f"a tensor of slots {missing}")


def check_slots(frame: int, slots: range | Tensor, num_slots: int, seen: set[int] | None) -> None:
    """`seen` collects the slots of a scatter, to find one that is named twice."""
    if isinstance(slots, range):
        check_range(slots, num_slots)
    else:
        check_index(slots)
        low, high = (int(bound) for bound in slots.aminmax())
        if low < HOLE or high >= num_slots:
            token = next(i for i, slot in enumerate(slots.tolist()) if not HOLE <= slot < num_slots)
            raise bad_slot(frame, token, int(slots[token]), num_slots)
    if seen is None:
        return
    for token, slot in zip(count(), slots if isinstance(slots, range) else slots.tolist()):
        if slot in seen:
            raise slot_twice(frame, token, slot)
        if slot >= 0:
            seen.add(slot)


def host_slots(
    frame: int, slots: range | Tensor, num_slots: int, seen: set[int] | None
) -> range | array[int]:
    """Checked slots, those of a tensor copied: its owner may change it while a copy of it is on its way."""
    check_slots(frame, slots, num_slots, seen)
    return slots if isinstance(slots, range) else array("q", slots.tolist())


def snapshot(
    frames: Sequence[tuple[range | Tensor, Sequence[memoryview]]],
) -> list[tuple[range | Tensor, tuple[memoryview, ...]]]:
    """The payloads' segments as they are now, whatever another thread does to the lists they came in."""
    return [(slots, tuple(map(memoryview, payload))) for slots, payload in frames]


def address_of(memory: memoryview) -> int:
    """Where bytes lie that may be read-only, which ctypes alone doesn't tell."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def bad_num_layers(frame: int, found: int, num_layers: int) -> ValueError:
    return ValueError(f"{found} payload segments for {num_layers} layers in frame {frame}")


def check_layers(frame: int, payload: Sequence[memoryview], num_layers: int) -> None:
    if len(payload) != num_layers:
        raise bad_num_layers(frame, len(payload), num_layers)
