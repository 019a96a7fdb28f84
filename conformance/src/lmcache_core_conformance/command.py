"""`lmcache-core conformance`: certifies an installed backend without writing a test, and keeps the report."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.markup import escape

from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.registry import discover
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.configured import ConfiguredHarness, configured_harness, harness_named
from lmcache_core_conformance.deviations import deviations_of
from lmcache_core_conformance.effort import effort_of, reduced, words_of
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.html import TITLE, render
from lmcache_core_conformance.output import Output, OutputError, writable
from lmcache_core_conformance.process import Told, not_kept_by_threads, terminable
from lmcache_core_conformance.redaction import Redactor
from lmcache_core_conformance.report import (
    FORMAT,
    ReportDocument,
    ReportError,
    circumstances,
    describe,
    differences,
    encode,
    parse,
    schema,
)
from lmcache_core_conformance.runner import Interrupted, Report, Result, run
from lmcache_core_conformance.suite import GROUPS, NAMES
from lmcache_core_conformance.verdicts import Unproven, Verdict, said
from lmcache_core_conformance.watch import bounded

T = TypeVar("T")
_STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.UNPROVEN: "yellow",
    Verdict.NOT_APPLICABLE: "dim",
    Verdict.DEVIATION: "magenta",
}
_INDENT = " " * 16
_FILE = click.Path(path_type=Path, dir_okay=False)
_OUTPUT = click.Path(path_type=Path)


class CannotRun(click.ClickException):
    """Nothing was certified: the command was asked for what isn't there."""

    exit_code = 2


@click.group()
def conformance() -> None:
    """Certify a storage backend."""


@conformance.command("run")
@click.option("--backend", "name", required=True, help="The backend, as a config file names it.")
@click.option(
    "--config",
    "config_file",
    type=_FILE,
    help="A YAML file: `options` of the backend, `{tmp}` in them being a new directory for each store.",
)
@click.option(
    "--harness",
    "harness_name",
    help="Instead of --config: FILE.py:CLASS or MODULE:CLASS, a Harness with hooks of its own.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    type=click.Choice([group.group for group in GROUPS]),
    help="Only this group of properties; may be given several times.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where the temporary directories are made, such as the mount to certify.",
)
@click.option("--report", "report_file", type=_OUTPUT, help="Write the report here, as JSON.")
@click.option("--html", "html_file", type=_OUTPUT, help="Write the report here, as a page.")
@click.option("--strict", is_flag=True, help="Count unproven properties as failed.")
@click.option("--enforce-performance", is_flag=True, help="A figure below its floor fails its property.")
@click.pass_context
def run_command(
    context: click.Context,
    name: str,
    config_file: Path | None,
    harness_name: str | None,
    groups: tuple[str, ...],
    directory: Path | None,
    report_file: Path | None,
    html_file: Path | None,
    strict: bool,
    enforce_performance: bool,
) -> None:
    """Run the properties on an installed backend.

    Exit code 0: nothing failed. 1: a property failed, or with --strict one is unproven. 2: nothing was
    certified, because the backend, its options or a file is not what it should be; the message says which.
    130 or 143: it was interrupted or terminated; the report, of what had been run, says so.
    """
    with not_kept_by_threads(), terminable() as told:
        outputs = _or_cannot_run(lambda: _outputs(report_file, html_file))
        try:
            harness = _or_cannot_run(lambda: _harness(name, config_file, harness_name))
            try:
                deviations_of(harness, NAMES)
                effort_of(harness)
            except (TypeError, ValueError) as error:
                raise CannotRun(str(error)) from error
            if directory is not None:
                harness.directory = _or_cannot_run(partial(writable, directory))
            if enforce_performance:
                harness.enforce_performance = True
            # The suite makes faults happen: what a backend logs of them is no news, and drowns the verdicts.
            logging.getLogger().addHandler(logging.NullHandler())
            for output in outputs:
                _or_cannot_run(output.remove)
            report = _certify(harness, name, groups, told)
            if outputs:
                document = describe(report, harness, name=name)
                for output in outputs:
                    _or_cannot_run(partial(output.write, document))
        except KeyboardInterrupt:
            for output in outputs:
                _or_cannot_run(output.remove)
            click.echo("interrupted: nothing is reported")
            context.exit(told.code)
        if report.interrupted:
            context.exit(told.code)
        context.exit(int(report.failed or (strict and bool(report.of(Verdict.UNPROVEN)))))


@conformance.command("compare")
@click.argument("one", type=_FILE)
@click.argument("other", type=_FILE)
@click.pass_context
def compare_command(context: click.Context, one: Path, other: Path) -> None:
    """Say where the verdicts of two reports differ, and whether the same was certified in the same way.

    Exit code 0: no verdict differs. 1: one does. 2: a report can't be read, is empty or interrupted.
    """
    first, second = (_or_cannot_run(partial(_read, file)) for file in (one, other))
    found = _or_cannot_run(partial(differences, first, second))
    for line in [*circumstances(first, second), *found]:
        click.echo(line)
    if found:
        context.exit(1)
    click.echo(f"the same {len(first.results)} verdicts")


@conformance.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a report."""
    click.echo(json.dumps(schema(), indent=2))


def _harness(name: str, config_file: Path | None, harness_name: str | None) -> Harness:
    """
    Raises:
        LMCacheError: no such backend, or a file that isn't what it should be.
    """
    backend = discover().load(name)
    if harness_name is None:
        return configured_harness(backend, config_file)
    if config_file is not None:
        raise ConfigError("give --config or --harness, not both: a harness brings its own options")
    harness = harness_named(harness_name)
    if harness.backend is not backend:
        raise ConfigError(
            f"--harness {harness_name} is for {harness.backend.__module__}:{harness.backend.__qualname__}, "
            f"but the backend {name!r} is {backend.__module__}:{backend.__qualname__}"
        )
    return harness


def _outputs(report_file: Path | None, html_file: Path | None) -> list[Output]:
    """
    Raises:
        OutputError: one of them can't be written, or they are the same file.
    """
    outputs = []
    if report_file is not None:
        outputs.append(Output(report_file, encode, FORMAT.encode()))
    if html_file is not None:
        outputs.append(Output(html_file, lambda document: render(document).encode(), TITLE.encode()))
    if len(outputs) == 2 and outputs[0].is_same(outputs[1]):
        raise OutputError(f"--report and --html are the same file, {report_file}")
    return outputs


def _certify(harness: Harness, name: str, groups: Collection[str], told: Told) -> Report:
    """Runs and shows the properties, until `told` to end.

    Raises:
        CannotRun: as `_check_that_it_opens`.
        KeyboardInterrupt: interrupted before the first property was run.
    """
    redactor = _check_that_it_opens(harness, name)
    console = Console()

    def show(result: Result) -> None:
        _show(console, result, redactor.conceal)
        told.check()

    try:
        report = run(harness, groups=groups or None, on_result=show)
    except Interrupted as error:
        report = error.report
    _summarise(console, name, report, words_of(reduced(effort_of(harness))))
    return report


def _check_that_it_opens(harness: Harness, name: str) -> Redactor:
    """One error, instead of the same one for each property. Returns what keeps secrets off the terminal.

    Raises:
        CannotRun: its options are refused, lead to somebody's store, or it can't be opened with them.
    """
    bench = Bench(harness)
    redactor = Redactor(())
    try:
        redactor = Redactor.of(harness, bench)
        _check_that_stores_are_apart(harness, bench)
        bounded(lambda: bench.require("medium"), harness.limit_s)  # to know any capability, it is opened
        return redactor
    except Unproven:  # it opens, but declares what makes no sense: a property says so
        return redactor
    except ConfigError as error:
        raise CannotRun(
            f"backend {name!r} refuses its options (give them under `options` in --config FILE): "
            f"{redactor.conceal(str(error))}"
        ) from error
    except Exception as error:  # recorded boundary: the backend is foreign code
        message = redactor.conceal(f"{type(error).__name__}: {error}")
        raise CannotRun(f"backend {name!r} can't be opened: {message}") from error
    finally:
        bench.abandon()


def _check_that_stores_are_apart(harness: Harness, bench: Bench) -> None:
    """Before anything is opened: the suite fills, overwrites and deletes, in the store of whoever uses it.

    Raises:
        ConfigError: the file leads to one and the same place, which outlives the run.
    """
    if isinstance(harness, ConfiguredHarness) and not harness.has_placeholder:
        capabilities = bench.build(bench.place()).capabilities
        if capabilities.persistent or capabilities.shared:
            raise ConfigError(
                "no option has {tmp} in it, so that the suite would write and delete in a store that may be "
                'in use: put it into the option that tells stores apart, such as `path: "{tmp}/store"`'
            )


def _read(file: Path) -> ReportDocument:
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise ReportError(f"can't read {file}: {error.strerror}") from error
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from error


def _or_cannot_run(work: Callable[[], T]) -> T:
    try:
        return work()
    except LMCacheError as error:
        raise CannotRun(str(error)) from error


def _show(console: Console, result: Result, conceal: Callable[[str], str]) -> None:
    style = "yellow" if result.below_floor else _STYLES[result.verdict]
    verdict = said(result.verdict, below_floor=result.below_floor)
    _print(
        console,
        f"[{style}]{verdict:>14}[/]  {result.prop.group}: {escape(result.prop.sentence)} "
        f"[dim]{result.seconds:.2f} s[/]",
    )
    if result.reason:
        _print(console, f"{_INDENT}{escape(conceal(result.reason))}")
    if result.verdict is Verdict.FAILED:
        _print(console, f"{_INDENT}[dim]why it matters: {escape(result.prop.why)}[/]")
    for figure in result.figures:
        _print(console, f"{_INDENT}[dim]{escape(conceal(str(figure)))}[/]")


def _summarise(console: Console, name: str, report: Report, effort: str) -> None:
    slow = sum(result.below_floor for result in report.results)
    added = {Verdict.PASSED: f" ({slow} below floor)"} if slow else {}
    counts = [
        f"{len(found)} {verdict.value}{added.get(verdict, '')}"
        for verdict in Verdict
        if (found := report.of(verdict))
    ]
    took = f"in {report.seconds:.0f} s"
    _print(console, f"[bold]{escape(name)}[/]: {', '.join(counts) or 'nothing ran'}, {took}")
    if effort:
        _print(console, f"[yellow]{effort}[/]")
    if report.interrupted:
        _print(console, "[bold red]interrupted[/]: the rest was not run")
    reasons = Counter(result.reason for result in report.of(Verdict.UNPROVEN))
    for reason, number in reasons.items():
        _print(console, f"[yellow]{number} unproven[/]: {escape(reason)}")


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
