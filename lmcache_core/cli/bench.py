"""`lmcache-core bench`: real runs on this machine, with what they are compared to in the same run."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from lmcache_core.frame.header import MAX_SEGMENTS

PIPED_WIDTH = 120


def _a_number(context: click.Context, option: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which no range leaves out
        raise click.BadParameter("nan is not a number")
    return value


@click.group("bench")
def command() -> None:
    """Measures what this machine and a config give."""


@command.command("pipeline")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Tiers to load from, a YAML file; those in memory are left out if there is another. Without it: "
    "the disk, in a temporary directory below the current one.",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(0.0, 60_000.0),
    callback=_a_number,
    default=5.0,
    show_default=True,
    help="Time that one layer's compute takes: a wait, as if an accelerator did it.",
)
@click.option(
    "--matmul",
    type=click.IntRange(1, 16_384),
    help="Compute a product of two N x N matrices with torch instead.",
)
@click.option(
    "--tokens",
    type=click.IntRange(16),
    default=1024,
    show_default=True,
    help="Length of the hit; rounded down to a multiple of 16.",
)
@click.option("--layers", type=click.IntRange(1, MAX_SEGMENTS), default=32, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="KV heads, of 128 bf16.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each kind.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draws the timeline too, as .png, .pdf or .svg. Needs matplotlib.",
)
def pipeline(
    config: Path | None,
    compute_ms: float,
    matmul: int | None,
    tokens: int,
    layers: int,
    heads: int,
    repeats: int,
    plot: Path | None,
) -> None:
    """Loads KV layer by layer while each layer is computed, and shows how much of the loading that hides.

    Stores the KV first. Shows the middle one of the pipelined runs, beside the fastest load without compute.
    Exit code 1 when what was loaded isn't what was stored.
    """
    from lmcache_core.cli.bench_pipeline import Shape, compute_of, draw, measure, require_plot

    if plot is not None:
        if plot.suffix not in (".png", ".pdf", ".svg"):
            raise click.BadParameter(f"{plot} ends in none of .png, .pdf, .svg", param_hint="--plot")
        if not plot.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no directory {plot.absolute().parent}", param_hint="--plot")
        require_plot()
    tokens -= tokens % 16
    compute = compute_of(compute_ms / 1e3, matmul)
    shape = Shape(num_tokens=tokens, num_layers=layers, num_heads=heads)
    timeline = measure(config, shape, compute, repeats)
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "load from", "arrived", "scattered", "compute from", "to ms"):
        table.add_column(title, justify="right")
    for layer, times in enumerate(timeline.layers):
        moments = (
            *(times.load_from, times.arrived, times.load_to),
            *(times.compute_from, times.compute_to),
        )
        table.add_row(str(layer), *(f"{moment * 1e3:.1f}" for moment in moments))
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    console.print(table)
    click.echo(
        f"{shape.nbytes / 2**20:.0f} MiB, {tokens} tokens. Loading alone {timeline.load_s * 1e3:.1f} ms, "
        f"computing alone {timeline.compute_s * 1e3:.1f} ms, one after the other "
        f"{timeline.sequential_s * 1e3:.1f} ms, in a pipeline {timeline.pipelined_s * 1e3:.1f} ms."
    )
    click.echo(
        f"The first layer could be computed after {timeline.layers[0].load_to * 1e3:.1f} ms. {timeline.told}"
    )
    if plot is not None:
        draw(timeline, plot)
        click.echo(f"Drawn in {plot}.")
