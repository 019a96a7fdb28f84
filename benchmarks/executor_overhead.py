"""What a call costs through the executor, beside the same call made directly.

    python benchmarks/executor_overhead.py [--calls 1000] [--rounds 20] [--output FILE]

The backend does nothing but settle its items; what a get brought is verified either way. Times run from
`submit` on the calling thread to `settled` on another, and until the calling thread has woken up again (what
a caller that waits sees); the direct call is the backend's method, and the check, on the calling thread with
a bare call object. A put wakes one thread, a get a second one, which verifies: so beside each stands what it
takes to wake as many threads that do nothing, each waiting on a lock, as those do.

Rounds of all three take turns. Figures are the median round's median call and, as spread, the best and the
worst round's. Exits with 1 when a put or a get of one item has 50 µs or
more of overhead, the wake-ups included.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lmcache_core.events import EventBus
from lmcache_core.frame import FrameHeader, FrameKind, Segment, seal, verify
from lmcache_core.identity.keys import StorageKey, chunk_key
from lmcache_core.memory import MemoryPool
from lmcache_core.storage import (
    Backend,
    BackendStats,
    Breaker,
    Call,
    Capabilities,
    Item,
    Job,
    Operation,
    Outcome,
    Priority,
    RetryBudget,
    Status,
    TierExecutor,
    TierHost,
    Verifier,
    View,
)

COMMAND = "python benchmarks/executor_overhead.py"
BOUND_S = 50e-6
PART = "0123456789abcdef"
BATCH = 64
OK = Outcome(status=Status.OK)


class NoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backend has none."""


class NullBackend(Backend[NoOptions]):
    """Settles every item at once and moves nothing."""

    config_class = NoOptions

    def __init__(self, config: NoOptions) -> None:
        """There is nothing to keep."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="memory")

    def open(self, host: object) -> None:
        """Nothing to connect to."""

    def close(self) -> None:
        """Nothing to let go of."""

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index in range(len(items)):
            call.done(index, OK)

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.done(index, Outcome(status=Status.OK, nbytes=item.nbytes))

    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index in range(len(keys)):
            call.done(index, OK)

    def stats(self) -> BackendStats:
        return BackendStats()


class DirectCall:
    """The least that a backend can be called with."""

    deadline = float("inf")
    cancelled = False

    def remaining(self) -> float:
        return 1.0

    def done(self, index: int, outcome: Outcome) -> None:
        """Nobody waits."""


class TimedJob(Job):
    """Notes when its last item was settled."""

    priority = Priority.LOAD

    def __init__(self, operation: Operation, items: Sequence[Item]) -> None:
        self.operation = operation
        self.deadline = time.monotonic() + 60
        self.num_items = len(items)
        self.nbytes = 0
        self.settled_at = 0.0
        self.finish = threading.Lock()
        self.finish.acquire()
        self._items = items
        self._left = len(items)

    def prepare(self) -> Sequence[Item]:
        return self._items

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        if outcome.status is not Status.OK:
            raise SystemExit(f"item {index}: {outcome}")
        self._left -= 1
        if not self._left:
            self.settled_at = time.perf_counter()

    def landed(self, index: int, outcome: Outcome) -> None:
        raise SystemExit("a call was late")

    def finished(self) -> None:
        self.finish.release()


def build_items(pool: MemoryPool) -> list[Item]:
    """A batch of views of one small sealed frame: 4 KiB of header, 4 KiB of payload."""
    key = chunk_key(PART, bytes(32))
    header = FrameHeader(
        kind=FrameKind.CHUNK,
        key=key,
        parent=None,
        part=PART,
        content_format="kv float32 64",
        first_token=0,
        num_tokens=1,
        segments=(Segment(4096, 4096),),
    )
    lease = pool.allocate(header.frame_nbytes, owner="benchmark", deadline=time.monotonic() + 1)
    seal(lease.memory, header)
    return [Item(key, (View(lease.address, lease.nbytes, pool.buffer, lease.offset),)) for _ in range(BATCH)]


def through(executor: TierExecutor, operation: Operation, items: Sequence[Item]) -> tuple[float, float]:
    """Seconds from submit to settled, and until this thread knows that the job is finished."""
    job = TimedJob(operation, items)
    start = time.perf_counter()
    executor.submit(job)
    with job.finish:
        end = time.perf_counter()
    return job.settled_at - start, end - start


class Relay:
    """Threads in a row, each of which waits for the one before it: the last wakes the caller."""

    def __init__(self, num_threads: int) -> None:
        self._arrived = 0.0
        self._open = True
        self._locks = [threading.Lock() for _ in range(num_threads + 1)]  # the last is the caller's
        for lock in self._locks:
            lock.acquire()
        for position in range(num_threads):
            threading.Thread(target=self._pass_on, args=(position,), daemon=True).start()

    def _pass_on(self, position: int) -> None:
        mine, following = self._locks[position : position + 2]
        while True:
            mine.acquire()
            if following is self._locks[-1]:
                self._arrived = time.perf_counter()
            following.release()
            if not self._open:
                return

    def once(self) -> tuple[float, float]:
        """Seconds until the last thread runs, and until this one runs again."""
        start = time.perf_counter()
        self._locks[0].release()
        self._locks[-1].acquire()
        end = time.perf_counter()
        return self._arrived - start, end - start

    def close(self) -> None:
        self._open = False
        self.once()


def direct(method: Callable[[Sequence[Item], Call], None], items: Sequence[Item], *, check: bool) -> float:
    call = DirectCall()
    start = time.perf_counter()
    method(items, call)
    if check:
        for item in items:
            verify(item.views[0].host or memoryview(b""), key=item.key, part=PART)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Round:
    """Medians of one case, in seconds an item."""

    settled_s: float
    waited_s: float
    woken_s: float
    back_s: float
    direct_s: float

    @property
    def overhead_s(self) -> float:
        return self.settled_s - self.direct_s


def spread(rounds: Sequence[float]) -> str:
    middle = statistics.median(rounds)
    return f"{middle * 1e6:7.2f} µs ({min(rounds) * 1e6:.2f} to {max(rounds) * 1e6:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="calls of one item in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    pool = MemoryPool(4 << 20, huge_pages=False)
    items = build_items(pool)
    backend = NullBackend(NoOptions())
    verifier = Verifier()
    host = TierHost(
        tier="null",
        deadline_s=60,
        max_in_flight=1,
        capacity_bytes=None,
        parts=(PART,),
        pool=pool,
        on_lost=lambda copies, reason: None,
        on_lost_all=lambda reason: None,
    )
    executor = TierExecutor(
        backend,
        host,
        max_in_flight=1,
        in_flight_bytes=1 << 30,
        queue_limit=16,
        read_breaker=Breaker(failures=5, cool_down_s=5),
        write_breaker=Breaker(failures=5, cool_down_s=5),
        retry=RetryBudget(),
        verifier=verifier,
        events=EventBus(),
    )
    executor.open(time.monotonic() + 5)

    relays = {Operation.PUT: Relay(1), Operation.GET: Relay(2)}
    cases = {
        "put": (Operation.PUT, backend.put_many, items[:1]),
        "get, verified": (Operation.GET, backend.get_many, items[:1]),
        f"put of {BATCH}, an item": (Operation.PUT, backend.put_many, items),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (operation, method, batch) in cases.items():
            calls = range(max(args.calls // len(batch), 1))
            woken = [relays[operation].once() for _ in calls]
            ours = [through(executor, operation, batch) for _ in calls]
            bare = [direct(method, batch, check=operation is Operation.GET) for _ in calls]
            columns = (*zip(*ours, strict=True), *zip(*woken, strict=True), bare)
            rounds[name].append(Round(*(statistics.median(column) / len(batch) for column in columns)))
    executor.close(time.monotonic() + 5)
    verifier.close()
    for relay in relays.values():
        relay.close()

    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    lines = [f"{machine}, Python {platform.python_version()}: {args.rounds} rounds of {args.calls} calls", ""]
    for name, of_case in rounds.items():
        wakings = "two wake-ups" if cases[name][0] is Operation.GET else "one wake-up"
        for what, times in (
            ("submit to settled", [each.settled_s for each in of_case]),
            (f"  {wakings}, bare", [each.woken_s for each in of_case]),
            ("until the caller runs again", [each.waited_s for each in of_case]),
            (f"  {wakings} and back, bare", [each.back_s for each in of_case]),
            ("direct", [each.direct_s for each in of_case]),
        ):
            lines.append(f"{name:>20}  {what:<30} {spread(times)}")
        lines.append("")
    met = True
    for name in ("put", "get, verified"):
        overhead_s = statistics.median(each.overhead_s for each in rounds[name])
        woken_s = statistics.median(each.woken_s for each in rounds[name])
        met &= overhead_s < BOUND_S
        lines.append(
            f"overhead of a {name}: {overhead_s * 1e6:.1f} µs, bound {BOUND_S * 1e6:.0f} µs: "
            f"{'met' if overhead_s < BOUND_S else 'MISSED'}; bare wake-ups {woken_s * 1e6:.1f} µs, "
            f"so {overhead_s / woken_s:.1f} times these, {(overhead_s - woken_s) * 1e6:.1f} µs more"
        )
    report = "\n".join(lines)
    print(report)
    if args.output is not None:
        args.output.write_text(f"# Executor overhead\n\n`{COMMAND}`\n\n```\n{report}\n```\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
