"""The report of a run as a document: written and read as versioned JSON, and free of secrets."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from lmcache_core.errors import LMCacheError
from lmcache_core.storage.contract import API, Capabilities
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.effort import effort_of, reduced
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.redaction import Redactor, Value, shown_options
from lmcache_core_conformance.runner import Report
from lmcache_core_conformance.suite import NAMES
from lmcache_core_conformance.verdicts import Unproven, Verdict, said

FORMAT = "lmcache-core-conformance-report"
VERSION = (1, 1)
"""Of the format. A reader of the same major understands a later minor, whose new fields it ignores."""
CORE, SUITE = "lmcache-core", "lmcache-core-conformance"


def about(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class ReportError(LMCacheError):
    """A file is not a report, or one of a major version that this suite doesn't know."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was certified."""

    name: Annotated[str, about("as a config file names it; the class's name where it has none")]
    implementation: Annotated[str, about("`module:class`")]
    distribution: Annotated[str, about("the installed distribution; empty where there is none")]
    version: Annotated[str, about("of the distribution")]
    api: Annotated[tuple[int, int], about("version of the contract it was written for")]
    protocols: Annotated[tuple[str, ...], about("optional protocols it implements, such as `Resident`")]
    options: Annotated[
        dict[str, Value],
        about("its options where they are numbers, switches or choices; text is never shown"),
    ]


class SuiteVersions(msgspec.Struct, frozen=True, kw_only=True):
    """What it was certified with."""

    version: Annotated[str, about("of the suite")]
    core: Annotated[str, about("version of `lmcache-core`")]
    api: Annotated[tuple[int, int], about("version of the contract that this core speaks")]
    complete: Annotated[bool, about("whether every property of the suite was run")]
    effort: Annotated[
        dict[str, float], about("how hard the suite tried: the numbers of the harness, by name")
    ]
    reduced: Annotated[
        tuple[str, ...],
        about("those of `effort` weaker than the suite's defaults: less work, more time allowed"),
    ]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran. No host name, address or path."""

    python: Annotated[str, about("implementation and version")]
    system: Annotated[str, about("operating system and its version")]
    machine: Annotated[str, about("instruction set")]
    processor: Annotated[str, about("the processor's own name, where it tells")]
    processors: Annotated[int, about("how many this process may use")]
    memory_bytes: Annotated[int, about("main memory")]
    file_system: Annotated[str, about("of the directory that the stores were made in")]


class PropertyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one property said."""

    name: Annotated[str, about("the test's name, which a `Deviation` uses")]
    group: Annotated[str, about("its group")]
    sentence: Annotated[str, about("the name as words")]
    why: Annotated[str, about("why the property exists")]
    verdict: Annotated[Verdict, about("one of the verdicts above")]
    detail: Annotated[
        str, about("what was seen; the missing hook, the capability, or the deviation's reason")
    ]
    seconds: Annotated[float, about("how long it took")]
    below_floor: Annotated[
        bool, about("whether it passed only because floors were not enforced: a figure is below its floor")
    ] = False

    @property
    def said(self) -> str:
        """The verdict in words."""
        return said(self.verdict, below_floor=self.below_floor)


class MeasuredFigure(msgspec.Struct, frozen=True, kw_only=True):
    """What the performance group measured."""

    property: Annotated[str, about("the property that measured it")]
    name: Annotated[str, about("what was timed")]
    unit: Annotated[str, about("of `value` and `baseline_value`")]
    value: Annotated[float, about("the median over the rounds")]
    baseline: Annotated[str, about("what ran in turn with it")]
    baseline_value: Annotated[float, about("the baseline's median")]
    ratio: Annotated[float, about("median over the rounds of ours to the baseline's")]
    low: Annotated[float, about("lower quartile of that ratio")]
    high: Annotated[float, about("upper quartile of that ratio")]
    rounds: Annotated[int, about("how often both were timed")]
    floor: Annotated[float, about("the ratio below which it fails, where floors are enforced")]
    enforced: Annotated[bool, about("whether floors were enforced in this run")]


class ReportDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    format: Annotated[str, about(f"always `{FORMAT}`")]
    version: Annotated[tuple[int, int], about("of this format: major, minor")]
    started: Annotated[str, about("when the run began: UTC, ISO 8601")]
    seconds: Annotated[float, about("how long it took")]
    backend: Annotated[Subject, about("what was certified")]
    suite: Annotated[SuiteVersions, about("what it was certified with")]
    environment: Annotated[Environment, about("where")]
    capabilities: Annotated[
        dict[str, Value],
        about("what it offers once open: the fields of `Capabilities`, sets as sorted lists"),
    ]
    results: Annotated[tuple[PropertyResult, ...], about("one for each property run, in the suite's order")]
    figures: Annotated[tuple[MeasuredFigure, ...], about("what the performance group measured")]
    interrupted: Annotated[
        bool, about("whether the run was stopped before its end: what isn't in `results` was not reached")
    ] = False

    def of(self, verdict: Verdict) -> tuple[PropertyResult, ...]:
        return tuple(result for result in self.results if result.verdict is verdict)

    @property
    def groups(self) -> dict[str, tuple[PropertyResult, ...]]:
        """The results by group, in the suite's order."""
        names = dict.fromkeys(result.group for result in self.results)
        return {name: tuple(r for r in self.results if r.group == name) for name in names}


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    format: str = ""
    version: tuple[int, int] = (0, 0)


def describe(report: Report, harness: Harness, *, name: str | None = None) -> ReportDocument:
    """The document of a run. Opens the backend once more where its capabilities aren't known yet.

    Texts that came out of the backend are cleaned of the secrets in its options, of credentials in
    URLs and of paths.

    Raises:
        ReportError: `harness` is for another backend than was run.
    """
    if harness.backend is not report.backend:
        ran, named = report.backend.__qualname__, harness.backend.__qualname__
        raise ReportError(f"the report is of {ran}, the harness is for {named}")
    bench = Bench(harness, backend=report.backend)
    try:
        redactor = Redactor.of(harness, bench)
        results = tuple(
            PropertyResult(
                name=result.prop.name,
                group=result.prop.group,
                sentence=result.prop.sentence,
                why=" ".join(result.prop.why.split()),
                verdict=result.verdict,
                detail=redactor.clean(result.reason),
                seconds=round(result.seconds, 3),
                below_floor=result.below_floor,
            )
            for result in report.results
        )
        return ReportDocument(
            format=FORMAT,
            version=VERSION,
            started=datetime.fromtimestamp(report.started, UTC).isoformat(timespec="seconds"),
            seconds=round(report.seconds, 1),
            backend=_subject(bench, name),
            suite=_suite(harness, {result.prop.name for result in report.results}),
            environment=_environment(bench.directory),
            capabilities=capabilities_of(bench),
            results=results,
            figures=_figures(report, harness, redactor),
            interrupted=report.interrupted,
        )
    finally:
        bench.abandon()


def encode(document: ReportDocument) -> bytes:
    """The document as indented JSON, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def parse(content: bytes) -> ReportDocument:
    """Reads what `encode` wrote, by this version or a later one of the same major.

    Raises:
        ReportError: not a report, or of another major version.
    """
    try:
        head = msgspec.json.decode(content, type=_Head)
    except msgspec.DecodeError as error:
        raise ReportError(f"not a conformance report: {error}") from error
    if head.format != FORMAT:
        raise ReportError(f"not a conformance report: its `format` is {head.format!r}, not {FORMAT!r}")
    if head.version[0] != VERSION[0]:
        raise ReportError(
            f"the report's format is version {head.version[0]}.{head.version[1]}, this suite reads "
            f"{VERSION[0]}.x: use the release of {SUITE} that wrote it, or a newer one"
        )
    try:
        return msgspec.json.decode(content, type=ReportDocument)
    except msgspec.DecodeError as error:
        raise ReportError(f"a damaged conformance report: {error}") from error


def schema() -> Mapping[str, object]:
    """The JSON schema (draft 2020-12) of a report."""
    document = msgspec.json.schema(ReportDocument)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FORMAT, **document}


def differences(one: ReportDocument, other: ReportDocument) -> list[str]:
    """Where the verdicts of two reports differ, a line each.

    Raises:
        ReportError: one is of a run that was interrupted, or has no results.
    """
    if not (one.results and other.results):
        raise ReportError("a report without results says nothing: run it again")
    if one.interrupted or other.interrupted:
        raise ReportError("a run that was interrupted says nothing of what it did not reach: run it again")
    first, second = ({result.name: result.said for result in report.results} for report in (one, other))
    return [
        f"{name}: {first.get(name, 'not run')}, then {second.get(name, 'not run')}"
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def circumstances(one: ReportDocument, other: ReportDocument) -> list[str]:
    """Where two reports differ in what was certified and how, a line each: verdicts may differ for that."""
    pairs = {
        "backend": [f"{r.backend.name} ({r.backend.implementation})" for r in (one, other)],
        "its version": [r.backend.version or "none" for r in (one, other)],
        "suite": [r.suite.version for r in (one, other)],
        "core": [r.suite.core for r in (one, other)],
        "effort": [", ".join(f"{n} {v:g}" for n, v in sorted(r.suite.effort.items())) for r in (one, other)],
    }
    return [f"{what} differs: {first}, then {then}" for what, (first, then) in pairs.items() if first != then]


def capabilities_of(bench: Bench) -> dict[str, Value]:
    """What the backend offers once open, or declares where it can't be opened; nothing if that is amiss."""
    try:
        bench.check_declared()
        capabilities = bench.capabilities
    except Unproven:
        return {}
    except Exception:  # noqa: BLE001 (recorded boundary: the backend is foreign code, and its run is over)
        declared: Capabilities = bench.build(bench.place()).capabilities
        capabilities = declared
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in dataclasses.asdict(capabilities).items()
    }


def _subject(bench: Bench, name: str | None) -> Subject:
    backend = bench.backend_class
    distribution, version = _distribution_of(backend)
    try:
        protocols: Sequence[str] = ["Resident"] if bench.is_resident else []
    except Exception:  # noqa: BLE001 (as in capabilities_of)
        protocols = []
    return Subject(
        name=name or backend.__name__,
        implementation=f"{backend.__module__}:{backend.__qualname__}",
        distribution=distribution,
        version=version,
        api=backend.api,
        protocols=tuple(protocols),
        options=shown_options(backend.config_class, bench.place().options),
    )


def _suite(harness: Harness, ran: set[str]) -> SuiteVersions:
    effort = effort_of(harness)
    return SuiteVersions(
        version=importlib.metadata.version(SUITE),
        core=importlib.metadata.version(CORE),
        api=API,
        complete=ran == NAMES,
        effort={name: effort[name] for name in sorted(effort)},
        reduced=reduced(effort),
    )


def _figures(report: Report, harness: Harness, redactor: Redactor) -> tuple[MeasuredFigure, ...]:
    return tuple(
        msgspec.convert(
            {
                **{name: _shown(value, redactor) for name, value in dataclasses.asdict(figure).items()},
                "property": result.prop.name,
                "enforced": harness.enforce_performance,
            },
            MeasuredFigure,
        )
        for result in report.results
        for figure in result.figures
    )


def _shown(value: object, redactor: Redactor) -> object:
    """A number to four digits, since the rest is noise; a text, such as a driver's, without secrets."""
    if isinstance(value, str):
        return redactor.clean(value)
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _distribution_of(backend: type[object]) -> tuple[str, str]:
    """The distribution that a class was installed with, and its version; empty when there is none."""
    package = backend.__module__.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(package, [])
    return (names[0], importlib.metadata.version(names[0])) if names else ("", "")


def _environment(directory: Path) -> Environment:
    return Environment(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        machine=platform.machine(),
        processor=_after("/proc/cpuinfo", "model name"),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        file_system=_file_system(directory),
    )


def _after(path: str, label: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(label)), "")


def _file_system(directory: Path) -> str:
    """The type of the file system that `directory` is on; empty when the system doesn't tell."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    found = [(len(m[1]), m[2]) for m in mounts if directory.resolve().is_relative_to(m[1])]
    return max(found)[1] if found else ""
