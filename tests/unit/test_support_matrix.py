"""The reports of our own plugins, and the pages made from them and from the suite, are of today."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import msgspec
import pytest

from lmcache_core_conformance import (
    PROPERTIES,
    Harness,
    ReportDocument,
    ReportError,
    Verdict,
    encode,
    parse,
)
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.configured import harness_named
from lmcache_core_conformance.report import capabilities_of

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
REPORTS = REFERENCE / "reports"
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
STALE = "stale: run `make reports`"


def report_of(plugin: str) -> ReportDocument:
    return parse((REPORTS / f"{plugin}.json").read_bytes())


def harness_of(plugin: str) -> Harness:
    """The harness that `make reports` uses."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"call CERTIFY,{plugin},(\w+)\)", makefile)
    assert found, f"`make reports` leaves out {plugin}"
    return harness_named(f"{ROOT}/plugins/{plugin}/tests/test_conformance.py:{found[1]}")


def test_every_plugin_has_a_report_and_no_report_lacks_its_plugin() -> None:
    assert sorted(path.stem for path in REPORTS.iterdir()) == PLUGINS, STALE


@pytest.mark.parametrize("page", ["format", "matrix"])
def test_the_pages_say_what_the_reports_and_the_suite_say(page: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "generate_conformance.py"))
    due = script["render_format"]() if page == "format" else script["render_matrix"](script["read_reports"]())
    text = script[f"{page.upper()}_PAGE"].read_text(encoding="utf-8")
    assert text == due, "stale: run `python docs/generate_conformance.py`"


def test_the_example_of_reading_a_report_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (REFERENCE / "conformance-report.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(example, "conformance-report.md", "exec"), {})
    assert capsys.readouterr().out.startswith("disk {'declaration': ")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_report_covers_the_properties_of_todays_suite(plugin: str) -> None:
    reported = [(r.name, r.group, r.sentence, r.why) for r in report_of(plugin).results]
    due = [(p.name, p.group, p.sentence, " ".join(p.why.split())) for p in PROPERTIES]
    assert reported == due, STALE


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_report_tells_the_capabilities_and_versions_of_today(
    plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    report, bench = report_of(plugin), Bench(harness_of(plugin))
    try:
        assert report.capabilities == capabilities_of(bench), STALE
    finally:
        bench.close()
    versions = {
        report.backend.distribution: report.backend.version,
        "lmcache-core": report.suite.core,
        "lmcache-core-conformance": report.suite.version,
    }
    assert versions == {name: importlib.metadata.version(name) for name in versions}, STALE
    assert report.backend.distribution == f"lmcache-core-{plugin}"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_our_own_plugins_pass_everything_with_nothing_unproven_at_full_effort(plugin: str) -> None:
    report = report_of(plugin)
    assert report.of(Verdict.FAILED) == ()
    assert report.of(Verdict.UNPROVEN) == ()
    assert report.suite.reduced == ()
    assert report.suite.complete
    assert report.figures


@pytest.mark.parametrize("why", ["interrupted", "partial", "fewer"])
def test_the_matrix_is_not_made_from_a_report_that_leaves_properties_out(why: str, tmp_path: Path) -> None:
    report = report_of("cpu")
    if why == "interrupted":
        report = msgspec.structs.replace(report, interrupted=True)
    elif why == "fewer":
        report = msgspec.structs.replace(report, results=report.results[:5])
    else:
        report = msgspec.structs.replace(report, suite=msgspec.structs.replace(report.suite, complete=False))
    (tmp_path / "cpu.json").write_bytes(encode(report))
    script = runpy.run_path(str(ROOT / "docs" / "generate_conformance.py"))
    with pytest.raises(ReportError, match=r"cpu\.json is of a run that left properties out"):
        script["read_reports"](tmp_path)


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_the_matrix_is_not_made_from_a_report_of_reduced_effort(told: bool, tmp_path: Path) -> None:
    report = report_of("cpu")
    effort = {**report.suite.effort, "slack_s": 1e6}
    suite = msgspec.structs.replace(report.suite, effort=effort, reduced=("slack_s",) if told else ())
    (tmp_path / "cpu.json").write_bytes(encode(msgspec.structs.replace(report, suite=suite)))
    script = runpy.run_path(str(ROOT / "docs" / "generate_conformance.py"))
    with pytest.raises(ReportError, match=r"cpu\.json is of a run with reduced effort: slack_s"):
        script["read_reports"](tmp_path)
