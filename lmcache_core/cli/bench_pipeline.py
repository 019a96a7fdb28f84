"""The measurement behind `lmcache-core bench pipeline`: a real layerwise load beside a layer's compute."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click

from lmcache_core.config import ByteSize, CacheConfig, load_config
from lmcache_core.connectors import needs_extra
from lmcache_core.engine import CacheEngine
from lmcache_core.events import Event, LayerLoaded
from lmcache_core.frame import PAGE_NBYTES, padded_nbytes
from lmcache_core.identity import Content, ModelRecord, Part

CONTENT_NBYTES = 2 * 128 * 2
"""Of one token and head: K and V of 128 bf16."""
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much KV is loaded."""

    num_tokens: int
    num_layers: int
    num_heads: int

    @property
    def layer_nbytes(self) -> int:
        return self.num_tokens * self.num_heads * CONTENT_NBYTES

    @property
    def nbytes(self) -> int:
        return self.num_layers * self.layer_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer's moments, in seconds since the load began."""

    load_from: float
    arrived: float
    """It is in memory, verified. It is scattered when the caller asks for it."""
    load_to: float
    compute_from: float
    compute_to: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The middle one of several pipelined runs, beside the fastest load without compute."""

    layers: Sequence[LayerTimes]
    load_s: float
    """Of all layers, nothing being computed."""

    @property
    def compute_s(self) -> float:
        return sum(times.compute_to - times.compute_from for times in self.layers)

    @property
    def sequential_s(self) -> float:
        return self.load_s + self.compute_s

    @property
    def pipelined_s(self) -> float:
        return self.layers[-1].compute_to

    @property
    def overlap(self) -> float:
        """Which part of the shorter of the two, loading and computing, took no time of its own."""
        return (self.sequential_s - self.pipelined_s) / max(min(self.load_s, self.compute_s), 1e-9)

    @property
    def told(self) -> str:
        if self.overlap < 0:
            longer_s = self.pipelined_s - self.sequential_s
            return f"Overlap: none, the pipeline took {longer_s * 1e3:.1f} ms longer."
        return f"Overlap: {self.overlap:.0%} of what could be hidden."


class _KV:
    """The engine's KV: one flat region a layer, token behind token."""

    def __init__(self, shape: Shape) -> None:
        self._token_nbytes = shape.num_heads * CONTENT_NBYTES
        self._right = memoryview(os.urandom(shape.layer_nbytes + shape.num_layers * PAGE_NBYTES))
        self._layers = [memoryview(bytearray(shape.layer_nbytes)) for _ in range(shape.num_layers)]

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        for layer, segment in enumerate(payload):
            segment[:] = self._expected(layer, first_token, num_tokens)

    def scatter_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        start = first_token * self._token_nbytes
        self._layers[layer][start : start + len(segment)] = segment

    def wipe(self) -> None:
        for memory in self._layers:
            memory[:] = bytes(len(memory))

    def is_right(self, num_tokens: int) -> bool:
        end = num_tokens * self._token_nbytes
        return all(
            memory[:end] == self._expected(layer, 0, num_tokens) for layer, memory in enumerate(self._layers)
        )

    def _expected(self, layer: int, first_token: int, num_tokens: int) -> memoryview:
        """The same random bytes, from another one on for each layer."""
        start = layer * PAGE_NBYTES + first_token * self._token_nbytes
        return self._right[start : start + num_tokens * self._token_nbytes]


class _Recorder:
    """Keeps when each layer was asked for and when it was there."""

    def __init__(self) -> None:
        self.loads: list[LayerLoaded] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, LayerLoaded):
            self.loads.append(event)


def compute_of(seconds: float, matmul: int | None) -> Callable[[], None]:
    """What stands for one layer's compute: a wait, or a product of matrices.

    Raises:
        ConfigError: torch is wanted and not installed.
    """
    if matmul is None:
        return lambda: time.sleep(seconds)
    with needs_extra("transformers"):
        torch = import_module("torch")
    left, right = torch.rand(matmul, matmul), torch.rand(matmul, matmul)
    product = torch.empty(matmul, matmul)

    def compute() -> None:
        torch.mm(left, right, out=product)

    return compute


def measure(file: Path | None, shape: Shape, compute: Callable[[], None], repeats: int) -> Timeline:
    """Stores the KV, then loads it without and with compute, in turns.

    Raises:
        ClickException: not all of it could be stored or loaded, or other bytes came back.
    """
    with _config(file, shape) as config:
        part = Part(
            layers=(0, shape.num_layers),
            heads=(0, shape.num_heads),
            content_format="bench",
            content_nbytes=CONTENT_NBYTES,
        )
        model = ModelRecord(weights=os.urandom(32).hex(), config={}, chunk_tokens=config.chunk_tokens)
        recorder = _Recorder()
        with CacheEngine(config, model=model, part=part, observers=[recorder]) as engine:
            content = engine.content(range(shape.num_tokens))
            kv = _KV(shape)
            try:
                engine.store(content, kv)
                engine.flush(DEADLINE_S)
                far = [tier.name for tier in engine.stats().tiers if tier.name not in engine.memory_tiers]
                held = engine.lookup(content, search_range=far or None).num_tokens
                if held < shape.num_tokens // 16 * 16:
                    raise click.ClickException(
                        f"only {held} of {shape.num_tokens} tokens were stored: give the tiers more "
                        f"capacity, or load fewer --tokens\n{engine.stats()}"
                    )
                alone: list[float] = []
                pipelined: list[Sequence[LayerTimes]] = []
                for _ in range(repeats):
                    alone.append(_run(engine, recorder, content, kv, far, lambda: None)[-1].load_to)
                    kv.wipe()
                    pipelined.append(_run(engine, recorder, content, kv, far, compute))
                    if not kv.is_right(held):
                        raise click.ClickException("what was loaded is not what was stored")
            finally:
                engine.clear(content)
    pipelined.sort(key=lambda layers: layers[-1].compute_to)
    return Timeline(layers=pipelined[len(pipelined) // 2], load_s=min(alone))


def require_plot() -> None:
    """Raises ConfigError where there is no matplotlib."""
    with needs_extra("plot"):
        import_module("matplotlib")


def draw(timeline: Timeline, file: Path) -> None:
    """Draws two bars a layer, loading and computing, into `file`; its suffix says the format.

    Raises:
        ClickException: the file can't be written.
    """
    with needs_extra("plot"):
        figure = import_module("matplotlib.figure").Figure(figsize=(9, 0.22 * len(timeline.layers) + 1.6))
    axes = figure.subplots()
    for height, name, spans in (
        (-0.2, "loaded", [(times.load_from, times.arrived) for times in timeline.layers]),
        (0.2, "computed", [(times.compute_from, times.compute_to) for times in timeline.layers]),
    ):
        axes.barh(
            [layer + height for layer in range(len(spans))],
            [(end - start) * 1e3 for start, end in spans],
            left=[start * 1e3 for start, _ in spans],
            height=0.4,
            label=name,
        )
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the load began")
    axes.set_ylabel("layer")
    axes.set_title(
        f"{timeline.pipelined_s * 1e3:.0f} ms, one after the other {timeline.sequential_s * 1e3:.0f} ms"
    )
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(file)
    except OSError as error:
        raise click.ClickException(f"the plot can't be written: {error}") from error


def _run(
    engine: CacheEngine,
    recorder: _Recorder,
    content: Content,
    kv: _KV,
    tiers: Sequence[str],
    compute: Callable[[], None],
) -> list[LayerTimes]:
    recorder.loads.clear()
    computed = []
    started = time.monotonic()
    for _ in engine.retrieve_layers(content, kv, search_range=tiers or None):
        begun = time.monotonic()
        compute()
        computed.append((begun, time.monotonic()))
    return [
        LayerTimes(
            load_from=load.requested_at - started,
            arrived=load.arrived_at - started,
            load_to=load.scattered_at - started,
            compute_from=begun - started,
            compute_to=ended - started,
        )
        for load, (begun, ended) in zip(recorder.loads, computed, strict=True)
    ]


@contextmanager
def _config(file: Path | None, shape: Shape) -> Iterator[CacheConfig]:
    """The user's, or one with a disk tier that is large enough, in a directory that goes away."""
    if file is not None:
        yield load_config(file)
        return
    nbytes = 2 * padded_nbytes(shape.nbytes) + (64 << 20)
    try:
        directory = tempfile.TemporaryDirectory(prefix=".bench-pipeline-", dir=Path.cwd())
    except OSError as error:
        raise click.ClickException(f"nothing can be written below {Path.cwd()}: {error}") from error
    with directory as folder:
        tier = {
            "name": "disk",
            "backend": "disk",
            "capacity": str(ByteSize(nbytes)),
            "deadline": f"{DEADLINE_S:g}s",
            "in_flight_bytes": str(ByteSize(nbytes)),
            "options": {"path": folder},
        }
        memory = {"staging": str(ByteSize(2 * nbytes))}
        yield load_config({"memory": memory, "tiers": [tier]})
