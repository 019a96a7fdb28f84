"""`PagedKV`: an engine's KV tensors, read and written in place by token slot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lmcache_core.errors import UnsupportedModel
from lmcache_core.kernels.compiled import CompiledMover, native_library
from lmcache_core.kernels.device import Device, cuda_device
from lmcache_core.kernels.layers import HostCopies, PagedLayers
from lmcache_core.kernels.layout import PagedLayout, blocks_layout, pairs_layout
from lmcache_core.kernels.narrow import NarrowingMover
from lmcache_core.kernels.reference import ReferenceMover
from lmcache_core.kernels.staging import StagedMover, Staging

if TYPE_CHECKING:
    from torch import Tensor

Slots: TypeAlias = "range | Tensor"
Payload: TypeAlias = Sequence[memoryview]


class Mover(Protocol):
    """Moves KV between one layout and payloads, in every way that `PagedKV` says."""

    def move(self, frames: Sequence[tuple[Slots, Payload]], *, gathering: bool) -> None: ...


class PagedKV:
    """An engine's KV tensors, read and written in place by token slot.

    A payload is one flat memoryview a layer (writable, to gather) of exactly
    `heads x tokens x content_nbytes` bytes: `[heads, tokens, 2 x dim]`, K then V. `slots` says where token
    i lies: a range of consecutive slots, or a 1-D int32 or int64 tensor of them in any order, in which -1 is
    a hole: its KV is neither read nor written, in the engine or in the payload.
    Nothing larger than an index is allocated. The compiled kernels do the work where `lmcache-core-kernels`
    is installed, plain torch operations otherwise; `threads` is for the former. With `narrow`, bfloat16 KV
    is stored as float8 with a scale for each K and V of a token and head: half the bytes, less precision.
    The tensors' memory must stay what it is while this lives: build one anew when a cache grows.
    One object may be used by several threads as far as their slots and payloads don't overlap.

    KV on a CUDA device goes through staging memory for two layers a direction (lmcache_core.kernels.staging),
    its kernels on torch's current stream; slots are given on the host. A move returns when the payload has
    been written, or read; what torch queues next sees what was scattered. `DeviceError`: CUDA failed.
    """

    def __init__(self, layout: PagedLayout, *, threads: int = 1, narrow: bool = False) -> None:
        threads = min(index(threads), 1 << 16)
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._make = partial(type(self), threads=threads, narrow=narrow)
        self._layout = layout
        if narrow:
            layout = replace(layout, content=replace(layout.content, narrow=True))
        device = device_of(layout)
        self._staging = None if device is None else Staging(device, layout)
        self._mover: Mover
        if self._staging is not None:
            self._mover = StagedMover(self._staging, range(layout.num_layers))
        elif native_library() is not None:
            self._mover = CompiledMover(layout, threads)
        else:
            self._mover = NarrowingMover(layout) if narrow else ReferenceMover(layout)
        self.num_layers = layout.num_layers
        self.num_heads = layout.num_heads
        self.num_slots = layout.num_slots
        self.content_format = layout.content.text
        self.content_nbytes = layout.content.nbytes

    @classmethod
    def from_pairs(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        axes: str = "bhtd",
        row: int = 0,
        threads: int = 1,
        narrow: bool = False,
    ) -> PagedKV:
        """One batch row of separate K and V tensors a layer, as Transformers keeps them.

        With left padding, the token at position p of a row lies in slot `pad + p`. Token pools such as
        SGLang's, `[slots, heads, dim]`, have no batch: axes `thd`.

        Raises:
            UnsupportedModel: shapes, dtypes, devices or strides that can't be said, with the numbers.
            ValueError: `axes` is no permutation of `bhtd` or `htd`, `row` is not in the batch, no layer.
        """
        import torch

        with torch.inference_mode():
            return cls(pairs_layout(keys, values, axes, row), threads=threads, narrow=narrow)

    @classmethod
    def from_blocks(
        cls, layers: Sequence[Tensor], *, axes: str, threads: int = 1, narrow: bool = False
    ) -> PagedKV:
        """One tensor of blocks a layer: axes `cnshd`, `ncshd`, `nhse`, `nshe` or any other order of those.

        Axes `nsd` are latents (MLA): one for all heads, no V.

        Raises:
            UnsupportedModel: shapes, dtypes, devices or strides that can't be said, with the numbers.
            ValueError: `axes` is none of the above, no layer.
        """
        import torch

        with torch.inference_mode():
            return cls(blocks_layout(layers, axes), threads=threads, narrow=narrow)

    def layer(self, number: int) -> PagedKV:
        """The same KV, of one layer: for moves a layer at a time. Its payloads have one view."""
        layout = replace(self._layout, layers=[self._layout.layers[number]])
        if not isinstance(self._mover, StagedMover):
            return self._make(layout)
        one = copy.copy(self)  # the staging is shared
        one._layout, one.num_layers = layout, 1
        one._mover = StagedMover(self._mover.staging, [self._mover.layers[number]])
        return one

    def by_layer(self, slots: Slots, *, stream: int | None = None) -> PagedLayers:
        """A request's KV, for `store_layers` and `retrieve_layers`: see `PagedLayers`.

        Raises:
            ValueError: a slot is out of bounds or named twice.
        """
        if self._staging is not None:
            return PagedLayers(self._staging, slots, stream=stream)
        movers = [self.layer(number)._mover for number in range(self.num_layers)]
        return PagedLayers(HostCopies(self._layout, movers), slots, stream=stream)

    def gather(self, slots: Slots, payload: Payload) -> None:
        """Copies the KV in `slots[i]` to token i of `payload`, for all layers.

        Raises:
            ValueError: slots or payload don't fit; nothing was written.
        """
        self._mover.move([(slots, payload)], gathering=True)

    def scatter(self, slots: Slots, payload: Payload) -> None:
        """Copies token i of `payload` to `slots[i]`, for all layers. No other slot is touched.

        Raises:
            ValueError: slots or payload don't fit, or a slot is named twice; nothing was written.
        """
        self._mover.move([(slots, payload)], gathering=False)

    def gather_many(self, frames: Sequence[tuple[Slots, Payload]]) -> None:
        """`gather` for several frames at once: all are checked before any is written.

        Raises:
            ValueError: as `gather`; nothing was written.
        """
        self._mover.move(frames, gathering=True)

    def scatter_many(self, frames: Sequence[tuple[Slots, Payload]]) -> None:
        """`scatter` for several frames at once: all are checked, together, before any is written.

        Raises:
            ValueError: as `scatter`; nothing was written.
        """
        self._mover.move(frames, gathering=False)


def device_of(layout: PagedLayout) -> Device | None:
    """What moves the layout's KV where it isn't on the host.

    Raises:
        UnsupportedModel: nothing here can, or it is to be narrowed, which is done on the host alone.
    """
    where = layout.device
    if where.type == "cpu":
        return None
    if layout.content.narrow:
        raise UnsupportedModel(f"the KV is on {where}; only KV on the host can be narrowed")
    device = cuda_device(where.index) if where.type == "cuda" else None
    if device is None:
        raise UnsupportedModel(
            f"the KV is on {where}: that needs CUDA and lmcache-core-kernels built with nvcc "
            "(`python -m lmcache_core_kernels` says what is there)"
        )
    return device
