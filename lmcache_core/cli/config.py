"""`lmcache-core config`: check a config file, print the JSON schema."""

from __future__ import annotations

import json
from pathlib import Path

import click

from lmcache_core.config import CacheConfig, json_schema, load_config
from lmcache_core.errors import LMCacheError
from lmcache_core.registry import discover


@click.group("config")
def command() -> None:
    """Checks a config file, or prints the schema for editors."""


@command.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--open", "open_tiers", is_flag=True, help="Also open each tier, as an engine would, and close it."
)
def check(file: Path, open_tiers: bool) -> None:
    """Checks FILE: its keys and values, that each plugin is there and usable, and each plugin's options.

    The first fault is printed with its place and what to do; the exit code is then 1.
    """
    config = load_config(file)
    try:
        _check_tiers(config, open_tiers=open_tiers)
    except LMCacheError as error:
        raise click.ClickException(f"{file}: {error}") from error
    chain = " -> ".join(f"{tier.name} ({tier.backend})" for tier in config.tiers)
    click.echo(f"{file}: ok: {chain}" + (", all opened" if open_tiers else ""))


@command.command("schema")
def schema() -> None:
    """Prints the JSON schema of the config file, for completion and checks in an editor."""
    click.echo(json.dumps(json_schema(), indent=2))


def _check_tiers(config: CacheConfig, *, open_tiers: bool) -> None:
    from lmcache_core.tiers.backends import build_backend

    registry = discover()
    for position, tier in enumerate(config.tiers):
        build_backend(tier, position, registry)
