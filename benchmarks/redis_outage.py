"""What an engine over cpu -> redis notices of a server that is stopped, or killed, under load for a while.

    python benchmarks/redis_outage.py [--outage 20] [--deadline 0.25] [--output FILE]

Two threads store and retrieve prompts, far more than the cpu tier holds. After some seconds the server is
stopped by SIGSTOP (connections stay open and are never answered) or killed (refused, and empty when it comes
back), and later continued or started again on the same port; nobody tells the engine. A retrieve asks the
tier twice at most, for its lookup and its load, each of which may last its deadline. A third thread only
sleeps and says how long this machine kept it from waking up. Exits with 1 where a call raised, took longer
than two deadlines, half a second and that, or no hit came from redis within 10 s of the return.
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
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

from lmcache_core.config import load_config
from lmcache_core.engine import CacheEngine
from lmcache_core.events import BreakerChanged
from lmcache_core.identity import ModelRecord, Part

TESTS = Path(__file__).parents[1] / "plugins" / "redis" / "tests"
CHUNK, LAYERS, TOKEN_NBYTES = 256, 8, 1024
PROMPT_TOKENS = 4 * CHUNK
NUM_PROMPTS = 32
STEADY_S = 5.0
SLACK_S = 0.5
RETURN_S = 10.0


def of_the_tests(name: str) -> ModuleType:
    """A module of the plugin's tests: they start the servers."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


servers = of_the_tests("servers")


@dataclass(frozen=True)
class Timed:
    """One call of the engine: when it began, how long it took, how many tokens came from redis."""

    what: str
    at: float
    seconds: float
    from_redis: int = 0


class KV:
    """KV whose every byte says which token of which prompt it belongs to."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def gather(self, first: int, count: int, payload: Sequence[memoryview]) -> None:
        for layer, memory in enumerate(payload):
            memory[:] = self._expected(layer, first, count)

    def scatter(self, first: int, count: int, payload: Sequence[memoryview]) -> None:
        for layer, memory in enumerate(payload):
            if memory != self._expected(layer, first, count):
                raise SystemExit("KV of other tokens")

    def _expected(self, layer: int, first: int, count: int) -> bytes:
        row = (self._seed * 1_000_003 + layer * 4099 + first).to_bytes(8, "little")
        return row * (count * TOKEN_NBYTES // 8)


class Sleeper(threading.Thread):
    """Notes by how much it wakes up late: what the machine does to anybody."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.latest_s = 0.0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            started = time.monotonic()
            self.stopped.wait(0.01)
            self.latest_s = max(self.latest_s, time.monotonic() - started - 0.01)


class Load:
    """Threads that store and retrieve until they are stopped."""

    def __init__(self, engine: CacheEngine) -> None:
        self.calls: list[Timed] = []
        self.errors: list[BaseException] = []
        self._engine = engine
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, first: int) -> None:
        try:
            while not self._stopped.is_set():
                for seed in range(first, NUM_PROMPTS, 2):
                    tokens = array("i", range(seed * 10_000, seed * 10_000 + PROMPT_TOKENS))
                    self._time("store", lambda t=tokens, s=seed: self._store(t, s))  # type: ignore[misc]
                    self._time("retrieve", lambda t=tokens, s=seed: self._retrieve(t, s))  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 (told in the report)
            self.errors.append(error)

    def _store(self, tokens: array[int], seed: int) -> int:
        self._engine.store(tokens, KV(seed))
        return 0

    def _retrieve(self, tokens: array[int], seed: int) -> int:
        return self._engine.retrieve(tokens, KV(seed)).tokens_by_tier.get("redis", 0)

    def _time(self, what: str, call: Callable[[], int]) -> None:
        started = time.monotonic()
        from_redis = call()
        self.calls.append(Timed(what, started, time.monotonic() - started, from_redis))


@contextmanager
def killed(server: object) -> Iterator[None]:
    server.kill()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        server.start()  # type: ignore[attr-defined]


def outage(kind: str, outage_s: float, deadline_s: float) -> tuple[list[str], bool]:
    server = servers.Server(servers.require("redis"))
    server.start()
    config = {
        "chunk_tokens": CHUNK,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "16MiB"},
            {
                "name": "redis",
                "backend": "redis",
                "deadline": deadline_s,
                "options": {"url": f"redis://127.0.0.1:{server.port}"},
                "breaker": {"cool_down": "1s"},
            },
        ],
    }
    model = ModelRecord(weights="00", config={}, chunk_tokens=CHUNK)
    part = Part(layers=(0, LAYERS), heads=(0, 1), content_format="outage", content_nbytes=TOKEN_NBYTES)
    pause, changes = threading.Event(), []
    with CacheEngine(load_config(config), model=model, part=part) as engine:
        engine.subscribe(_Keep(changes), BreakerChanged)
        sleeper = Sleeper()
        sleeper.start()
        with Load(engine) as load:
            pause.wait(STEADY_S)
            began = time.monotonic()
            with server.frozen() if kind == "stopped" else killed(server):
                pause.wait(outage_s)
            ended = time.monotonic()
            pause.wait(RETURN_S)
    sleeper.stopped.set()
    server.kill()
    return report(kind, load, began, ended, deadline_s, sleeper.latest_s, len(changes))


class _Keep:
    def __init__(self, events: list[object]) -> None:
        self._events = events

    def on_event(self, event: object) -> None:
        self._events.append(event)


def report(
    kind: str,
    load: Load,
    began: float,
    ended: float,
    deadline_s: float,
    latest_s: float,
    num_changes: int,
) -> tuple[list[str], bool]:
    bound_s = 2 * deadline_s + SLACK_S + latest_s
    lines = [f"{kind} for {ended - began:.1f} s, a tier deadline of {deadline_s * 1e3:.0f} ms"]
    phases = {
        "before": [call for call in load.calls if call.at < began],
        "during": [call for call in load.calls if began <= call.at < ended],
        "after": [call for call in load.calls if call.at >= ended],
    }
    for name, calls in phases.items():
        for what in ("store", "retrieve"):
            seconds = sorted(call.seconds for call in calls if call.what == what)
            hits = sum(call.from_redis > 0 for call in calls if call.what == what)
            median_ms, longest_ms = statistics.median(seconds) * 1e3, seconds[-1] * 1e3
            line = f"{len(seconds):6} calls, median {median_ms:7.2f} ms, longest {longest_ms:7.1f} ms"
            with_hits = f", {hits} with KV from redis" if what == "retrieve" else ""
            lines.append(f"  {name:7} {what:9} {line}{with_hits}")
    hits_at = [call.at + call.seconds for call in phases["after"] if call.from_redis]
    longest = max(call.seconds for call in load.calls)
    returned = f"{hits_at[0] - ended:.2f} s after the server's return" if hits_at else "NEVER"
    lines.append(f"  first hit from redis {returned}; breakers changed {num_changes} times")
    allowed = f"{longest * 1e3:.0f} ms of {bound_s * 1e3:.0f} allowed"
    lines.append(f"  {len(load.errors)} calls raised; longest call {allowed}")
    lines.append(f"  a thread that only sleeps woke up to {latest_s * 1e3:.0f} ms late")
    return lines, not load.errors and longest < bound_s and bool(hits_at)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--outage", type=float, default=20.0)
    parser.add_argument("--deadline", type=float, default=0.25)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    print(machine)
    text, met = [machine], True
    for kind in ("stopped", "killed"):
        lines, ok = outage(kind, args.outage, args.deadline)
        print("\n".join(lines), flush=True)
        text += ["", *lines]
        met &= ok
    if args.output is not None:
        command = f"python benchmarks/redis_outage.py --outage {args.outage:g} --deadline {args.deadline:g}"
        body = "\n".join(text)
        args.output.write_text(
            f"# cpu -> redis while the server is away\n\n`{command}`\n\n```\n{body}\n```\n"
        )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
