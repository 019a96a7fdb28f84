"""`lmcache-core config`: check a config file, print the JSON schema."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lmcache_core.config import CacheConfig, json_schema, load_config
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.events import Event, EventBus, TierDown
from lmcache_core.registry import Registry, discover

CLOSE_DEADLINE_S = 5.0


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
    config = checked(file, open_tiers=open_tiers)
    chain = " -> ".join(f"{tier.name} ({tier.backend})" for tier in config.tiers)
    click.echo(f"{file}: ok: {chain}" + (", all opened" if open_tiers else ""))


def checked(file: Path, *, open_tiers: bool = False, may_be_down: bool = False) -> CacheConfig:
    """The config in `file`, once its tiers can be built; and once opened and closed, with `open_tiers`.

    A tier that `may_be_down` is refused only for what no waiting mends.

    Raises:
        ConfigError: the file can't be read or holds something that isn't understood.
        ClickException: a plugin is missing or refuses its options, or a tier can't be opened; begins with
            the file.
    """
    config = load_config(file)
    try:
        _check_tiers(config, open_tiers=open_tiers, may_be_down=may_be_down)
    except LMCacheError as error:
        message = str(error)  # an error about a key begins with the file and the key's line
        raise click.ClickException(
            message if message.startswith(str(file)) else f"{file}: {message}"
        ) from error
    return config


@command.command("schema")
def schema() -> None:
    """Prints the JSON schema of the config file, for completion and checks in an editor."""
    click.echo(json.dumps(json_schema(), indent=2))


def _check_tiers(config: CacheConfig, *, open_tiers: bool, may_be_down: bool) -> None:
    from lmcache_core.tiers.backends import prepare_tiers

    registry = discover()
    prepare_tiers(config, registry)
    if open_tiers:
        failures = _open_tiers(config, registry)
        for position, tier in enumerate(config.tiers):
            if tier.name in failures and not may_be_down:
                message = f"can't be opened: {failures[tier.name]}"
                raise ConfigError(config.located(("tiers", position), message))


def _open_tiers(config: CacheConfig, registry: Registry) -> dict[str, str]:
    """Opens and closes every tier. Returns why those that are down are."""
    from lmcache_core.tiers import build_chain

    events = EventBus()
    failures = _Failures()
    events.subscribe(failures)
    with _told_once():
        chain = build_chain(config, registry, parts=(), events=events)
        chain.close(time.monotonic() + CLOSE_DEADLINE_S)
    return failures.reasons


@contextmanager
def _told_once() -> Iterator[None]:
    """Keeps the core's log lines about a tier that is down off the terminal: the command says it itself."""
    core, silent = logging.getLogger("lmcache_core"), logging.NullHandler()
    core.addHandler(silent)
    try:
        yield
    finally:
        core.removeHandler(silent)


class _Failures:
    """Remembers the first reason for which each tier is down."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def on_event(self, event: Event) -> None:
        if isinstance(event, TierDown):
            self.reasons.setdefault(event.tier, event.reason)
