"""`PagedLayers`: a request's KV by layer, for `store_layers` and `retrieve_layers`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Protocol

from lmcache_core.kernels.checks import HOLE, host_slots
from lmcache_core.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from torch import Tensor


class LayerCopies(Protocol):
    """How single layers are moved: queued on a device (`Staging`), or at once (`HostCopies`)."""

    @property
    def layout(self) -> PagedLayout: ...

    def current_stream(self) -> int: ...

    def move(
        self, layer: int, slots: range | array[int], segment: memoryview, stream: int, *, gathering: bool
    ) -> None: ...

    def wait(self, *, gathering: bool) -> None: ...

    def sweep(self) -> None:
        """Lets go of memory whose copies have ended."""


class LayerMover(Protocol):
    """What moves the frames of one layer on the host."""

    def move(
        self, frames: Sequence[tuple[range | Tensor, Sequence[memoryview]]], *, gathering: bool
    ) -> None: ...


class HostCopies:
    """The KV of a layout on the host, a mover for each layer: a move has ended when it returns."""

    def __init__(self, layout: PagedLayout, movers: Sequence[LayerMover]) -> None:
        self.layout = layout
        self._movers = movers

    def current_stream(self) -> int:
        return 0

    def move(
        self, layer: int, slots: range | array[int], segment: memoryview, stream: int, *, gathering: bool
    ) -> None:
        import torch

        where = slots if isinstance(slots, range) else torch.frombuffer(slots, dtype=torch.int64)
        self._movers[layer].move([(where, [segment])], gathering=gathering)

    def wait(self, *, gathering: bool) -> None:
        pass

    def sweep(self) -> None:
        pass


class PagedLayers:
    """Moves layers between frames and the KV of one request, whose token i lies in `slots[i]`.

    On a device moves are queued: a store waits for its copies before frames are committed, a load not at
    all. `stream` is the engine's, as CUDA's handle: kernels run on it, behind what the engine has queued
    there and before what it queues next. Where a store or load ends early, copies may be in flight: the
    frames' memory is not used again until they have ended. On the host a move has ended when it returns.
    A token in a hole is left out of loads, and can't be stored: frames are whole.
    """

    def __init__(self, copies: LayerCopies, slots: range | Tensor, *, stream: int | None = None) -> None:
        """`slots` are checked, and copied, here; `stream` is torch's current one if it isn't given.

        Raises:
            ValueError: a slot is out of bounds or named twice.
            TypeError: `stream` is no handle.
        """
        copies.sweep()  # nobody waited for the last load: its frames are room for this request's
        self._copies = copies
        self._slots = host_slots(0, slots, copies.layout.num_slots, set())
        self._has_holes = isinstance(self._slots, array) and HOLE in self._slots
        self._stream = copies.current_stream() if stream is None else index(stream)

    def gather_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        """Queues the copy of a layer's KV to `segment`, which has it when `wait_gathered` returns.

        Raises:
            ValueError: the layer, the tokens or the segment don't fit, or a token has no slot.
            DeviceError: the device failed; the segment's contents are unknown.
        """
        self._move(layer, first_token, num_tokens, segment, gathering=True)

    def wait_gathered(self) -> None:
        """Blocks until the copies that `gather_layer` queued have ended.

        Raises:
            DeviceError: a copy failed, now or before; the segments' contents are unknown.
        """
        self._copies.wait(gathering=True)

    def scatter_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        """Queues the copy of `segment` to a layer's KV, before what the engine queues next.

        Raises:
            ValueError: the layer, the tokens or the segment don't fit.
            DeviceError: the device failed; the KV's contents are unknown.
        """
        self._move(layer, first_token, num_tokens, segment, gathering=False)

    def _move(
        self, layer: int, first_token: int, num_tokens: int, segment: memoryview, *, gathering: bool
    ) -> None:
        layer, num_layers = index(layer), self._copies.layout.num_layers
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer {layer} of {num_layers}")
        slots = self._slots[first_token : first_token + num_tokens]
        if len(slots) != num_tokens or first_token < 0 or num_tokens < 1:
            raise ValueError(f"{num_tokens} tokens from {first_token} on, of {len(self._slots)} slots")
        if gathering and self._has_holes and isinstance(slots, array) and HOLE in slots:
            token = first_token + slots.index(HOLE)
            raise ValueError(f"token {token} is in a hole: a frame without its KV can't be stored")
        self._copies.move(layer, slots, segment, self._stream, gathering=gathering)
