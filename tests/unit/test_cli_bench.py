"""`lmcache-core bench pipeline`: a small real run, its table, its plot, and what it says when it can't."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lmcache_core.cli.bench_pipeline import LayerTimes, Timeline
from lmcache_core.cli.main import main

SMALL = ("--tokens", "300", "--layers", "3", "--heads", "1", "--repeats", "1")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["bench", "pipeline", *arguments])

    return run


def test_it_prints_each_layers_moments_and_the_overlap(run: Any, tmp_path: Path) -> None:
    result = run(*SMALL, "--compute-ms", "1")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if re.match(r" *\d+ +\d", line)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    for _, *moments in rows:
        load_from, arrived, scattered, compute_from, compute_to = map(float, moments)
        assert load_from <= arrived <= scattered <= compute_from < compute_to
    assert "Overlap: " in result.output
    assert not list(tmp_path.iterdir()), "its tier's directory is left"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--plot", "out.xyz"), "out.xyz ends in none of .png, .pdf, .svg"),
        (("--plot", "nowhere/out.png"), "there is no directory"),
        (("--tokens", "15"), "15 is not in the range x>=16"),
        (("--layers", "4097"), "4097 is not in the range 1<=x<=4096"),
        (("--compute-ms", "nan"), "nan is not a number"),
        (("--compute-ms", "inf"), "inf is not in the range"),
        (("--matmul", "1000000"), "1000000 is not in the range"),
    ],
)
def test_what_cannot_be_drawn_or_loaded_is_refused_before_it_measures(
    run: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], says: str
) -> None:
    monkeypatch.setattr("lmcache_core.cli.bench_pipeline.measure", None)
    result = run(*SMALL, *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_it_measures_the_tiers_of_a_config_but_for_the_memory(run: Any, tmp_path: Path) -> None:
    Path("cache.yaml").write_text(
        "chunk_tokens: 64\n"
        "tiers:\n"
        "  - {name: near, backend: cpu, capacity: 8MiB}\n"
        "  - {name: far, backend: disk, capacity: 16MiB, options: {path: kv}}\n"
    )
    result = run(*SMALL, "--compute-ms", "0", "--config", "cache.yaml")
    assert result.exit_code == 0, result.output


def test_it_says_what_to_change_when_not_everything_was_stored(run: Any) -> None:
    Path("cache.yaml").write_text("tiers: [{name: near, backend: cpu, capacity: 512KiB}]\n")
    result = run(*SMALL, "--tokens", "3000", "--config", "cache.yaml")
    assert result.exit_code == 1
    assert "give the tiers more capacity, or load fewer --tokens" in result.output


def test_without_matplotlib_it_says_how_to_get_it_before_it_measures(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("lmcache_core.cli.bench_pipeline.measure", None)
    result = run(*SMALL, "--plot", "out.png")
    assert result.exit_code == 1
    assert "matplotlib is not installed, which this needs: pip install 'lmcache-core[plot]'" in result.output


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a stand-in for matplotlib was told to draw: method and arguments. It writes a file of one byte."""
    drawn: list[tuple[str, Any]] = []

    class Recording:
        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **settings: Any) -> Recording:
                drawn.append((name, (arguments, settings)))
                if name == "savefig":
                    arguments[0].write_bytes(b"p")
                return self

            return call

    figure = ModuleType("matplotlib.figure")
    figure.Figure = Recording  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    return drawn


def test_the_plot_has_a_bar_of_loading_and_one_of_computing_for_each_layer(
    run: Any, drawn: list[tuple[str, Any]]
) -> None:
    result = run(*SMALL, "--compute-ms", "0", "--plot", "out.png")
    assert result.exit_code == 0, result.output
    bars = [arguments for name, (arguments, _) in drawn if name == "barh"]
    assert [len(widths) for _, widths in bars] == [3, 3]
    assert [arguments for name, (arguments, _) in drawn if name == "savefig"] == [(Path("out.png"),)]


@pytest.mark.usefixtures("drawn")
def test_a_plot_that_cannot_be_written_is_told_behind_what_was_measured(run: Any) -> None:
    result = run(*SMALL, "--compute-ms", "0", "--plot", "/proc/out.png")  # not even root can
    assert result.exit_code == 1
    assert "Overlap: " in result.output
    assert "the plot can't be written: " in result.output
    assert isinstance(result.exception, SystemExit), "no traceback"


def test_the_overlap_is_what_a_pipeline_saves_of_the_shorter_of_the_two() -> None:
    def of(*ends: float) -> Timeline:
        layers = [
            LayerTimes(load_from=0, arrived=0, load_to=end - 1, compute_from=end - 1, compute_to=end)
            for end in ends
        ]
        return Timeline(layers=layers, load_s=4.0)

    assert of(5.0, 6.0).overlap == 0.0  # 4 s of loading and 2 of computing take 6
    assert of(2.0, 5.0).overlap == 0.5
    assert of(3.0, 4.0).overlap == 1.0
    assert of(3.0, 4.0).told == "Overlap: 100% of what could be hidden."
    assert of(6.0, 7.0).told == "Overlap: none, the pipeline took 1000.0 ms longer."
