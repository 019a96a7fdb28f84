"""KV between a device and frames, through places for two layers on the device: copies overlap the engine.

    gather    engine's stream    layer 1 → place A     layer 2 → place B     layer 3 → place A
              our stream                               A → frame             B → frame

    scatter   our stream         frame → place A       frame → place B       frame → place A
              engine's stream                          A → layer 1           B → layer 2

Kernels run on the engine's stream. So a gather takes what the engine queued before it, the engine may write
over KV once the gather is queued, and what it queues after a scatter sees all of it. It waits for the layer
that it is to use, and for a place: gathers of many layers are no faster than the copies.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_core.kernels.checks import HOLE, address_of, bad_segment, check_layers, host_slots, snapshot
from lmcache_core.kernels.compiled import planes_of
from lmcache_core.kernels.device import Device, DeviceError
from lmcache_core.kernels.layout import PagedLayout
from lmcache_core.kernels.overlap import Segment, check_segments

if TYPE_CHECKING:
    from torch import Tensor

STAGING_TOKENS = 1024
"""Of a layer that fit in a place. More are moved piece by piece."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Device memory for a layer's KV and its slots, and the two moments of its latest use."""

    kv: int
    slots: int
    filled: int
    emptied: int


class Lane:
    """One direction: a stream for its copies, two places, and the host memory that copies in flight need.

    After a failure it refuses work, for what is queued then is unknown. Use it under `lock`, but for `wait`
    and `close`.
    """

    def __init__(self, device: Device, kv_nbytes: int, slots_nbytes: int) -> None:
        self.lock = threading.Lock()  # guards all that follows: a move is queued as a whole
        self._device = device
        self._made = ExitStack()
        self._in_flight: deque[tuple[int, tuple[object, ...]]] = deque()  # event, memory
        self._idle: list[int] = []  # events
        self._failure = ""
        self._turn = 0
        try:
            self.stream = device.new_stream()
            self._made.callback(device.drop_stream, self.stream)
            memory = device.allocate(2 * (kv_nbytes + slots_nbytes))
            self._made.callback(device.free, memory)
            self._places = [
                _Place(at, at + kv_nbytes, self._new_event(), self._new_event())
                for at in (memory, memory + kv_nbytes + slots_nbytes)
            ]
        except BaseException:
            with suppress(DeviceError):
                self._made.close()
            raise

    def check(self) -> None:
        if self._failure:
            raise DeviceError(self._failure)

    def fail(self, error: BaseException) -> None:
        self._failure = f"staged copies failed before: {error!r}"

    def next_place(self) -> _Place:
        self._turn ^= 1
        return self._places[self._turn]

    def keep(self, *memory: object) -> int:
        """Keeps `memory` until the event returned is past. The caller records it behind the copy, or fails.

        A view that is kept keeps a frame's memory from being used again, whoever released the frame.
        """
        self._let_go()
        event = self._idle.pop() if self._idle else self._new_event()
        self._in_flight.append((event, memory))
        return event

    def sweep(self) -> None:
        """Lets go of memory whose copies have ended. Never blocks: a thread at work here sweeps by itself."""
        if self.lock.acquire(blocking=False):
            try:
                if not self._failure:  # else events may say less than was queued
                    with suppress(DeviceError):
                        self._let_go()
            finally:
                self.lock.release()

    def wait(self) -> None:
        with self.lock:
            self.check()
            if not self._in_flight:
                return
            try:
                self._device.wait(self._in_flight[-1][0])  # copies of one stream: the others ended before
            except BaseException as error:
                self.fail(error)
                raise
            self._idle += [event for event, _ in self._in_flight]
            self._in_flight.clear()

    def close(self) -> None:
        """Waits for what is in flight, then gives everything back."""
        with self.lock:
            self._failure = "the staged copies of this KV were closed"
            with suppress(DeviceError):
                self._device.drain(self.stream)
            for place in self._places:  # kernels of the engine's stream use them too
                with suppress(DeviceError):
                    self._device.wait(place.filled)
                with suppress(DeviceError):
                    self._device.wait(place.emptied)
            self._in_flight.clear()
            with suppress(DeviceError):
                self._made.close()

    def _let_go(self) -> None:
        while self._in_flight and self._device.is_done(self._in_flight[0][0]):
            self._idle.append(self._in_flight.popleft()[0])

    def _new_event(self) -> int:
        event = self._device.new_event()
        self._made.callback(self._device.drop_event, event)
        return event


class Staging:
    """The staged copies of an engine's KV. Thread-safe; takes device memory when a direction is first used.

    What is in flight when this is closed or garbage-collected is waited for.
    """

    def __init__(self, device: Device, layout: PagedLayout, *, staging_tokens: int = STAGING_TOKENS) -> None:
        from lmcache_core_kernels import abi, buffer

        planes = planes_of(layout)
        flat = [abi.Plane(*plane) for layer in planes for plane in layer]
        self.layout = layout  # keeps the memory alive
        self.extents = layout.extents()
        self.device = device
        self._abi = abi
        self._buffer = buffer.Buffer
        self._table = (abi.Plane * len(flat))(*flat)
        self._num_planes = len(planes[0])
        self._staging_tokens = staging_tokens
        self._lock = threading.Lock()  # guards _lanes
        self._lanes: dict[bool, Lane] = {}  # by whether it gathers
        self._end = weakref.finalize(self, _close, self._lanes)

    def current_stream(self) -> int:
        return self.device.current_stream()

    def close(self) -> None:
        """Waits for what is in flight, then frees the device memory. Idempotent; later moves start anew."""
        with self._lock:
            _close(self._lanes)

    def sweep(self) -> None:
        """Lets go of memory whose copies have ended, in both directions. Never blocks."""
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.sweep()

    def check_segment(
        self, frame: int, layer: int, num_tokens: int, segment: memoryview, *, gathering: bool
    ) -> None:
        nbytes = self.layout.num_heads * num_tokens * self.layout.content.nbytes
        if segment.nbytes != nbytes or (gathering and segment.readonly) or not segment.c_contiguous:
            raise bad_segment(frame, layer, nbytes, segment, written=gathering)

    def move(
        self, layer: int, slots: range | array[int], segment: memoryview, stream: int, *, gathering: bool
    ) -> None:
        """Queues the move of one layer of a frame, its slots being checked, behind `stream`'s work.

        What comes next on `stream` runs after it. The segment is kept, and in use until `wait`.

        Raises:
            ValueError: the segment doesn't fit.
            DeviceError: the device refused, now or before; of slots and segment nothing is known then.
        """
        self.check_segment(0, layer, len(slots), segment, gathering=gathering)
        self.device.check_thread()
        lane = self._lane(gathering)
        token_nbytes = self.layout.content.nbytes
        move = self._gather if gathering else self._scatter
        with lane.lock, self._buffer(segment, writable=gathering) as buffer:
            lane.check()
            try:
                for first, count in _pieces(slots, self._staging_tokens):
                    piece = slots[first : first + count]
                    copied = lane.keep(piece, memoryview(segment))
                    at = buffer.address + first * token_nbytes
                    move(lane, layer, piece, at, len(slots) * token_nbytes, stream, copied)
            except BaseException as error:
                lane.fail(error)
                raise

    def wait(self, *, gathering: bool) -> None:
        """Blocks until the copies of a direction have ended: what was gathered is whole, segments are free.

        Raises:
            DeviceError: a copy failed, now or before.
        """
        self._lane(gathering).wait()

    def _lane(self, gathering: bool) -> Lane:
        with self._lock:
            if gathering not in self._lanes:
                kv_nbytes = self._staging_tokens * self.layout.num_heads * self.layout.content.nbytes
                self._lanes[gathering] = Lane(
                    self.device, -(-kv_nbytes // 16) * 16, -(-self._staging_tokens // 2) * 16
                )
            return self._lanes[gathering]

    def _gather(
        self, lane: Lane, layer: int, slots: range | array[int], at: int, pitch: int, stream: int, copied: int
    ) -> None:
        device, place, num_heads = self.device, lane.next_place(), self.layout.num_heads
        nbytes = len(slots) * self.layout.content.nbytes
        device.follow(stream, place.emptied)
        self._put_slots(place, slots, stream)
        self._launch(place, layer, slots, stream, gathering=True)
        device.record(place.filled, stream)
        device.follow(lane.stream, place.filled)
        device.copy(at, pitch, place.kv, nbytes, nbytes, num_heads, lane.stream)
        device.record(place.emptied, lane.stream)
        device.record(copied, lane.stream)

    def _scatter(
        self, lane: Lane, layer: int, slots: range | array[int], at: int, pitch: int, stream: int, copied: int
    ) -> None:
        device, place, num_heads = self.device, lane.next_place(), self.layout.num_heads
        nbytes = len(slots) * self.layout.content.nbytes
        device.follow(lane.stream, place.emptied)
        self._put_slots(place, slots, lane.stream)
        device.copy(place.kv, nbytes, at, pitch, nbytes, num_heads, lane.stream)
        device.record(place.filled, lane.stream)
        device.record(copied, lane.stream)
        device.follow(stream, place.filled)
        self._launch(place, layer, slots, stream, gathering=False)
        device.record(place.emptied, stream)

    def _put_slots(self, place: _Place, slots: range | array[int], stream: int) -> None:
        if isinstance(slots, array):
            nbytes = 8 * len(slots)
            self.device.copy(place.slots, nbytes, slots.buffer_info()[0], nbytes, nbytes, 1, stream)

    def _launch(
        self, place: _Place, layer: int, slots: range | array[int], stream: int, *, gathering: bool
    ) -> None:
        abi, layout = self._abi, self.layout
        planes = ctypes.addressof(self._table) + layer * self._num_planes * ctypes.sizeof(abi.Plane)
        shape = (layout.num_heads, layout.num_slots, layout.block_slots, layout.row_nbytes)
        segments = (ctypes.c_uint64 * 1)(place.kv)
        frame = abi.Frame(segments=ctypes.addressof(segments), slot_nbytes=8, num_tokens=len(slots))
        if isinstance(slots, range):
            frame.first_slot = slots.start
        else:
            frame.slots = place.slots
        native = abi.Layout(planes, 1, self._num_planes, *shape, 0)
        self.device.launch(native, frame, stream, gathering=gathering)


class StagedMover:
    """What `PagedKV` runs on where the KV is on a device: returns when the payload was written, or read."""

    def __init__(self, staging: Staging, layers: Sequence[int]) -> None:
        self.staging = staging
        self.layers = layers

    def move(self, frames: Sequence[tuple[range | Tensor, Sequence[memoryview]]], *, gathering: bool) -> None:
        staging = self.staging
        staging.sweep()
        frames = snapshot(frames)
        seen: set[int] | None = None if gathering else set()
        checked, segments = [], []
        for frame, (slots, payload) in enumerate(frames):
            checked.append(host_slots(frame, slots, staging.layout.num_slots, seen))
            check_layers(frame, payload, len(self.layers))
            for layer, segment in enumerate(payload):
                staging.check_segment(frame, layer, len(slots), segment, gathering=gathering)
                segments.append(Segment(address_of(segment), segment.nbytes, frame, layer))
        check_segments(segments, staging.extents, written=gathering)
        stream = staging.current_stream()
        for host, (_, payload) in zip(checked, frames, strict=True):
            for layer, segment in zip(self.layers, payload, strict=True):
                staging.move(layer, host, segment, stream, gathering=gathering)
        if frames:
            staging.wait(gathering=gathering)


def _close(lanes: dict[bool, Lane]) -> None:
    while lanes:
        lanes.popitem()[1].close()


def _pieces(slots: range | array[int], most: int) -> Iterator[tuple[int, int]]:
    """(first, count) of at most `most` tokens without a hole: what a place has for one must not be copied."""
    first = 0
    while first < len(slots):
        end = min(first + most, len(slots))
        if isinstance(slots, array):
            if slots[first] == HOLE:
                first += 1
                continue
            with suppress(ValueError):
                end = slots.index(HOLE, first, end)
        yield first, end - first
        first = end
