"""What this distribution adds to `lmcache-core`: the command `conformance`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_core.sdk import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def lmcache_commands() -> list[click.Command]:
    from lmcache_core_conformance.command import conformance

    return [conformance]
