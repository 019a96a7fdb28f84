"""`PagedLayers`: a request's KV by layer, for `store_layers` and `retrieve_layers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_core.kernels.checks import host_slots
from lmcache_core.kernels.staging import Staging

if TYPE_CHECKING:
    from torch import Tensor


class PagedLayers:
    """Moves layers between frames and the KV of one request, whose token i lies in `slots[i]`.

    Moves are queued: a store waits for the copies of a frame with its last layer, a load not at all. `stream`
    is the engine's, as CUDA's handle: kernels run on it, behind what the engine has queued there and before
    what it queues next. Where a store or load ends early, copies may be in flight: the frames' memory is not
    used again until they have ended.
    """

    def __init__(self, staging: Staging, slots: range | Tensor, *, stream: int | None = None) -> None:
        """`slots` are checked, and copied, here; `stream` is torch's current one if it isn't given.

        Raises:
            ValueError: a slot is out of bounds or named twice.
        """
        self._staging = staging
        self._slots = host_slots(0, slots, staging.layout.num_slots, set())
        self._stream = staging.device.current_stream() if stream is None else stream

    def gather_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        """Queues the copy of a layer's KV to `segment`; with the last layer, waits for all of them.

        Raises:
            ValueError: the tokens or the segment don't fit.
            DeviceError: the device failed; the segment's contents are unknown.
        """
        self._move(layer, first_token, num_tokens, segment, gathering=True)
        if layer == self._staging.layout.num_layers - 1:
            self._staging.wait(gathering=True)  # whoever commits the frame does so next

    def scatter_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        """Queues the copy of `segment` to a layer's KV, before what the engine queues next.

        Raises:
            ValueError: the tokens or the segment don't fit.
            DeviceError: the device failed; the KV's contents are unknown.
        """
        self._move(layer, first_token, num_tokens, segment, gathering=False)

    def _move(
        self, layer: int, first_token: int, num_tokens: int, segment: memoryview, *, gathering: bool
    ) -> None:
        slots = self._slots[first_token : first_token + num_tokens]
        if len(slots) != num_tokens or first_token < 0:
            raise ValueError(f"{num_tokens} tokens from {first_token} on, of {len(self._slots)} slots")
        self._staging.check_segment(0, layer, num_tokens, segment, gathering=gathering)
        self._staging.move(layer, slots, segment, self._stream, gathering=gathering)
