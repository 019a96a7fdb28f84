"""A device made of host memory, whose streams run in the worst order that their events allow."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_core.kernels.device import DeviceError
from lmcache_core_kernels import abi

ENGINE = 1
"""The host engine's stream."""
POISON = 0xEE


@dataclass
class Moment:
    passed: bool = False


class LazyDevice:
    """Work waits in its stream until the host waits for a moment that needs it; nothing else runs it.

    But for greedy streams, the engine's with `engine_greedy` and all others with `ours_greedy`: what no event
    holds back there runs at once. So work runs as late as it can, or as early; with both set, it is a device
    that does at once what it is told. Fresh memory is poisoned, and poisoned again when freed.

    `ignored` drops the events that a stream follows, for tests that prove they would be missed; `failing`
    names a method that raises, after `fail_after` good calls.
    """

    def __init__(
        self,
        *,
        engine_greedy: bool = False,
        ours_greedy: bool = False,
        ignored: Callable[[int], bool] = lambda stream: False,
        failing: str = "",
        fail_after: int = 0,
    ) -> None:
        self._library = abi.host_library()
        self._greedy = (engine_greedy, ours_greedy)
        self._ignored = ignored
        self.failing, self.fail_after = failing, fail_after
        self._queues: dict[int, deque[Callable[[], None] | Moment | tuple[Moment]]] = {ENGINE: deque()}
        self._moments: dict[int, Moment] = {}
        self._homes: dict[int, int] = {}  # stream of each moment, by its id
        self._memory: dict[int, ctypes.Array[ctypes.c_uint64]] = {}
        self._next_handle = 10
        self.waits: list[str] = []
        self.num_kernels_run = 0

    @property
    def live(self) -> tuple[int, int, int]:
        """Streams beside the engine's, events and allocations there are."""
        return len(self._queues) - 1, len(self._moments), len(self._memory)

    def queue(self, work: Callable[[], None], stream: int = ENGINE) -> None:
        """Work of the engine's own, or of the device's."""
        self._queues[stream].append(work)
        self._run_greedy()

    def finish(self) -> None:
        """Lets everything run."""
        for stream in list(self._queues):
            self._run(stream, None)

    # -- Device ----------------------------------------------------------------------------------

    def check_thread(self) -> None:
        self._may_fail("check_thread")

    def current_stream(self) -> int:
        return ENGINE

    def allocate(self, nbytes: int) -> int:
        self._may_fail("allocate")
        memory = (ctypes.c_uint64 * -(-nbytes // 8))()
        ctypes.memset(memory, POISON, ctypes.sizeof(memory))
        self._memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        memory = self._memory.pop(address)
        ctypes.memset(memory, POISON, ctypes.sizeof(memory))

    def new_stream(self) -> int:
        self._next_handle += 1
        self._queues[self._next_handle] = deque()
        return self._next_handle

    def drop_stream(self, stream: int) -> None:
        assert not self._queues.pop(stream), "a stream was dropped with work in it"

    def drain(self, stream: int) -> None:
        self.waits.append("drain")
        self._run(stream, None)

    def new_event(self) -> int:
        self._may_fail("new_event")
        self._next_handle += 1
        self._moments[self._next_handle] = Moment(passed=True)
        return self._next_handle

    def drop_event(self, event: int) -> None:
        del self._moments[event]

    def record(self, event: int, stream: int) -> None:
        self._may_fail("record")
        moment = self._moments[event] = Moment()
        self._homes[id(moment)] = stream
        self._queues[stream].append(moment)
        self._run_greedy()

    def follow(self, stream: int, event: int) -> None:
        self._may_fail("follow")
        if not self._ignored(stream):
            self._queues[stream].append((self._moments[event],))

    def is_done(self, event: int) -> bool:
        return self._moments[event].passed

    def wait(self, event: int) -> None:
        self.waits.append("wait")
        self._may_fail("wait")
        self._reach(self._moments[event])

    def copy(
        self,
        to: int,
        to_pitch: int,
        source: int,
        source_pitch: int,
        row_nbytes: int,
        num_rows: int,
        stream: int,
    ) -> None:
        self._may_fail("copy")

        def work() -> None:
            for row in range(num_rows):
                ctypes.memmove(to + row * to_pitch, source + row * source_pitch, row_nbytes)

        self.queue(work, stream)

    def launch(self, layout: abi.Layout, frame: abi.Frame, stream: int, *, gathering: bool) -> None:
        self._may_fail("launch")
        planes = (abi.Plane * (layout.num_layers * layout.num_planes)).from_buffer_copy(
            ctypes.string_at(layout.planes, ctypes.sizeof(abi.Plane) * layout.num_layers * layout.num_planes)
        )
        segments = (ctypes.c_uint64 * layout.num_layers).from_buffer_copy(
            ctypes.string_at(frame.segments, 8 * layout.num_layers)
        )
        layout, frame = type(layout).from_buffer_copy(layout), type(frame).from_buffer_copy(frame)
        layout.planes, frame.segments = ctypes.addressof(planes), ctypes.addressof(segments)
        kept = (planes, segments)
        move = self._library.lmck_gather_twin if gathering else self._library.lmck_scatter_twin

        def work() -> None:
            assert kept
            self.num_kernels_run += 1
            num_bad_slots = ctypes.c_int64()  # poisoned slots are bad ones: skipped, as a GPU does
            assert move(layout, frame, num_bad_slots) == abi.OK

        self.queue(work, stream)

    # -- running ---------------------------------------------------------------------------------

    def _may_fail(self, method: str) -> None:
        if method == self.failing:
            if self.fail_after <= 0:
                raise DeviceError(f"{method} failed on purpose")
            self.fail_after -= 1

    def _reach(self, moment: Moment) -> None:
        if not moment.passed:
            self._run(self._homes[id(moment)], moment)

    def _run(self, stream: int, until: Moment | None) -> None:
        queue = self._queues[stream]
        while queue and not (until is not None and until.passed):
            step = queue[0]
            if isinstance(step, tuple) and not step[0].passed:
                self._reach(step[0])  # by which others may run, this one too
                continue
            queue.popleft()
            if isinstance(step, tuple):
                continue
            if isinstance(step, Moment):
                step.passed = True
                self._run_greedy()  # who waited for it may be quicker than what comes next here
            else:
                step()

    def _run_greedy(self) -> None:
        ran = True
        while ran:
            ran = False
            for stream, queue in self._queues.items():
                while self._greedy[stream != ENGINE] and queue:
                    step = queue[0]
                    if isinstance(step, tuple):
                        if not step[0].passed:
                            break
                        queue.popleft()
                    elif isinstance(step, Moment):
                        queue.popleft().passed = True  # type: ignore[union-attr]
                    else:
                        queue.popleft()()  # type: ignore[operator]
                    ran = True
