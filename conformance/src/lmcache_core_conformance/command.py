"""`lmcache-core conformance run`: certifies an installed backend without writing a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from lmcache_core.config import ByteSize, Duration, parse_options
from lmcache_core.config.document import read_document
from lmcache_core.registry import discover
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.runner import Report, Result, run
from lmcache_core_conformance.suite import GROUPS
from lmcache_core_conformance.verdicts import Verdict

_PLACEHOLDER = "{tmp}"
_STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.UNPROVEN: "yellow",
    Verdict.NOT_APPLICABLE: "dim",
    Verdict.DEVIATION: "magenta",
}


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file given to `conformance run`. Its defaults are those of `Harness`."""

    options: dict[str, object] = {}
    """The backend's options; `{tmp}` in a text stands for a new, empty directory for each store."""
    unopenable: dict[str, object] | None = None
    """Options with which opening must fail, such as a forbidden directory or a closed port."""
    capacity: ByteSize = ByteSize(Harness.capacity_bytes)
    small_capacity: ByteSize = ByteSize(Harness.small_capacity_bytes)
    large_value: ByteSize = ByteSize(Harness.large_value_bytes)
    deadline: Duration = Duration(Harness.deadline_s)


class ConfiguredHarness(Harness):
    """A harness made from a file instead of a class."""

    def __init__(self, backend: type[Backend[Any]], config: RunConfig, directory: Path | None) -> None:
        self._backend_class = backend
        self._config = config
        self.capacity_bytes = config.capacity
        self.small_capacity_bytes = config.small_capacity
        self.large_value_bytes = config.large_value
        self.deadline_s = config.deadline
        self.directory = directory

    @property
    def backend(self) -> type[Backend[Any]]:  # type: ignore[override]  # known only now
        return self._backend_class

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {name: _fill_in(value, tmp) for name, value in self._config.options.items()}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        if self._config.unopenable is None:
            return super().unopenable_config(tmp)
        return {name: _fill_in(value, tmp) for name, value in self._config.unopenable.items()}


@click.group()
def conformance() -> None:
    """Certify a storage backend."""


@conformance.command("run")
@click.option("--backend", "name", required=True, help="The backend, as a config file names it.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="A YAML file: `options` of the backend, `{tmp}` in them being a new directory for each store.",
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
@click.option("--strict", is_flag=True, help="Count unproven properties as failed.")
@click.pass_context
def run_command(
    context: click.Context,
    name: str,
    config_file: Path | None,
    groups: tuple[str, ...],
    directory: Path | None,
    strict: bool,
) -> None:
    """Run the properties on an installed backend; exit code 1 when one fails."""
    backend = discover().load(name)
    document = {} if config_file is None else read_document(config_file).value
    config = parse_options(RunConfig, document, str(config_file or "--config"))
    harness = ConfiguredHarness(backend, config, directory)
    console = Console()
    report = run(harness, groups=groups or None, on_result=lambda result: _show(console, result))
    _summarise(console, name, report)
    if report.failed or (strict and report.of(Verdict.UNPROVEN)):
        context.exit(1)


def _show(console: Console, result: Result) -> None:
    style = _STYLES[result.verdict]
    console.print(
        f"[{style}]{result.verdict.value:>14}[/]  {result.prop.group}: {escape(result.prop.sentence)} "
        f"[dim]{result.seconds:.2f} s[/]",
        highlight=False,
        soft_wrap=True,
    )
    if result.reason:
        console.print(f"{'':>16}{escape(result.reason)}", highlight=False, soft_wrap=True)
    if result.verdict is Verdict.FAILED:
        console.print(
            f"{'':>16}[dim]why it matters: {escape(result.prop.why)}[/]", highlight=False, soft_wrap=True
        )


def _summarise(console: Console, name: str, report: Report) -> None:
    counts = [f"{len(report.of(verdict))} {verdict.value}" for verdict in Verdict if report.of(verdict)]
    console.print(
        f"[bold]{escape(name)}[/]: {', '.join(counts) or 'nothing ran'}", highlight=False, soft_wrap=True
    )


def _fill_in(value: object, tmp: Path) -> object:
    if isinstance(value, str):
        return value.replace(_PLACEHOLDER, str(tmp))
    if isinstance(value, list):
        return [_fill_in(entry, tmp) for entry in value]
    if isinstance(value, dict):
        return {key: _fill_in(entry, tmp) for key, entry in value.items()}
    return value
