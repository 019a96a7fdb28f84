"""What a call costs through the executor, beside the same call made directly.

    python benchmarks/executor_overhead.py [--calls 1000] [--rounds 20] [--output FILE]

The backend does nothing but settle its items; what a get brought is verified either way. Times run from
`submit` on the calling thread to `settled` on another, and until the calling thread has woken up again (what
a caller that waits sees); the direct call is the backend's method, and the check, on the calling thread with
a bare call object. Any executor wakes a thread for a call: so beside them stands the direct call on a bare
thread that is woken for it.

The three are made in turn, and the rounds of all cases take turns. The overhead is the median of the pairs'
differences. Figures are the median round's and, as spread, the best and the worst round's. Exits with 1 when
a put or a get of 8 KiB has 50 µs or more of overhead, waking included. The get of 32 MiB is for comparing:
the caller has checked as much just before, so all of Python's own memory is out of the caches when it begins.
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
from lmcache_core.frame import PAGE_NBYTES, FrameHeader, FrameKind, Segment, seal, verify
from lmcache_core.identity.keys import StorageKey, chunk_key
from lmcache_core.memory import Lease, MemoryPool
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
SMALL_NBYTES = 8 << 10
LARGE_NBYTES = 32 << 20
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


def build_items(lease: Lease) -> list[Item]:
    """A batch of views of one sealed frame that fills `lease`: 4 KiB of header, then one segment."""
    payload_nbytes = lease.nbytes - PAGE_NBYTES
    key = chunk_key(PART, bytes(32))
    header = FrameHeader(
        kind=FrameKind.CHUNK,
        key=key,
        parent=None,
        part=PART,
        content_format="kv float32 64",
        first_token=0,
        num_tokens=1,
        segments=(Segment(payload_nbytes, payload_nbytes),),
    )
    lease.memory[header.header_nbytes :] = os.urandom(payload_nbytes)
    seal(lease.memory, header)
    return [Item(key, (View(lease.address, lease.nbytes, lease.memory),)) for _ in range(BATCH)]


def through(executor: TierExecutor, operation: Operation, items: Sequence[Item]) -> tuple[float, float]:
    """Seconds from submit to settled, and until this thread knows that the job is finished."""
    job = TimedJob(operation, items)
    start = time.perf_counter()
    executor.submit(job)
    with job.finish:
        end = time.perf_counter()
    return job.settled_at - start, end - start


def direct(method: Callable[[Sequence[Item], Call], None], items: Sequence[Item], *, check: bool) -> float:
    call = DirectCall()
    start = time.perf_counter()
    method(items, call)
    if check:
        for item in items:
            verify(item.views[0].host or memoryview(b""), key=item.key, part=PART)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call, how many of them are a round, and whether the bound holds for it."""

    operation: Operation
    method: Callable[[Sequence[Item], Call], None]
    batch: Sequence[Item]
    calls: int
    is_bounded: bool = True

    def direct(self) -> float:
        return direct(self.method, self.batch, check=self.operation is Operation.GET)


class BareThread:
    """A thread that makes direct calls when it is woken, and wakes the caller."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._ended_at = 0.0
        self._mine, self._callers = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._callers.acquire()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._mine.acquire()
            if self._case is None:
                return
            self._case.direct()
            self._ended_at = time.perf_counter()
            self._callers.release()

    def call(self, case: Case) -> float:
        """Seconds until the call has been made."""
        self._case = case
        start = time.perf_counter()
        self._mine.release()
        self._callers.acquire()
        return self._ended_at - start

    def close(self) -> None:
        self._case = None
        self._mine.release()


@dataclass(frozen=True, slots=True)
class Round:
    """Medians of one case, in seconds an item."""

    settled_s: float
    waited_s: float
    direct_s: float
    bare_s: float
    overhead_s: float
    bare_overhead_s: float


def measured(case: Case, executor: TierExecutor, thread: BareThread) -> Round:
    calls = []
    for _ in range(case.calls):
        settled_s, waited_s = through(executor, case.operation, case.batch)
        direct_s, bare_s = case.direct(), thread.call(case)
        calls.append((settled_s, waited_s, direct_s, bare_s, settled_s - direct_s, bare_s - direct_s))
    return Round(*(statistics.median(column) / len(case.batch) for column in zip(*calls, strict=True)))


def spread(rounds: Sequence[float]) -> str:
    middle = statistics.median(rounds)
    return f"{middle * 1e6:7.2f} µs ({min(rounds) * 1e6:.2f} to {max(rounds) * 1e6:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="calls of one item in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    pool = MemoryPool(64 << 20, huge_pages=False)
    leases = [
        pool.allocate(nbytes, owner="benchmark", deadline=time.monotonic() + 1)
        for nbytes in (SMALL_NBYTES, LARGE_NBYTES)
    ]
    small, large = map(build_items, leases)
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

    thread = BareThread()
    cases = {
        "put": Case(Operation.PUT, backend.put_many, small[:1], args.calls),
        "get of 8 KiB": Case(Operation.GET, backend.get_many, small[:1], args.calls),
        "get of 32 MiB": Case(Operation.GET, backend.get_many, large[:1], max(args.calls // 20, 1), False),
        "put of 64, an item": Case(
            Operation.PUT, backend.put_many, small, max(args.calls // BATCH, 1), False
        ),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, case in cases.items():
            rounds[name].append(measured(case, executor, thread))
    executor.close(time.monotonic() + 5)
    verifier.close()
    thread.close()
    for lease in leases:
        lease.release()

    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    lines = [f"{machine}, Python {platform.python_version()}: {args.rounds} rounds of {args.calls} calls", ""]
    met = True
    for name, of_case in rounds.items():
        overhead = [each.overhead_s for each in of_case]
        for what, times in (
            ("submit to settled", [each.settled_s for each in of_case]),
            ("until the caller runs again", [each.waited_s for each in of_case]),
            ("direct", [each.direct_s for each in of_case]),
            ("direct, on a bare thread", [each.bare_s for each in of_case]),
            ("OVERHEAD, over direct", overhead),
            ("bare thread, over direct", [each.bare_overhead_s for each in of_case]),
        ):
            lines.append(f"{name:>20}  {what:<28} {spread(times)}")
        if cases[name].is_bounded:
            is_met = statistics.median(overhead) < BOUND_S
            met &= is_met
            lines.append(f"{name:>20}  bound {BOUND_S * 1e6:.0f} µs: {'met' if is_met else 'MISSED'}")
        lines.append("")
    report = "\n".join(lines).rstrip()
    print(report)
    if args.output is not None:
        args.output.write_text(f"# Executor overhead\n\n`{COMMAND}`\n\n```\n{report}\n```\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
