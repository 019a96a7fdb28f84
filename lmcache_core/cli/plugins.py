"""`lmcache-core plugins`: which plugins are installed and which of them can be used."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmcache_core.kernels import mover_text
from lmcache_core.registry import PluginInfo, PluginState, discover


@click.command("plugins")
def command() -> None:
    """Lists every installed plugin: name, version, api, state and cause; then what moves KV.

    Imports each backend, so that a missing driver shows here and not in production. Exit code 1 when
    a plugin can't be used.
    """
    found = discover().checked()
    if found:
        Console(soft_wrap=False).print(_table(found))
    else:
        click.echo("No plugins are installed. Install one by its name: pip install lmcache-core-NAME")
    click.echo(f"\nKV is moved by {mover_text()}")
    if any(plugin.state is not PluginState.OK for plugin in found):
        raise SystemExit(1)


def _table(found: Sequence[PluginInfo]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("name", "version", "api", "state", "cause"):
        table.add_column(title, overflow="fold")
    for plugin in found:
        api = f"{plugin.api[0]}.{plugin.api[1]}" if plugin.api is not None else "-"
        cells = (plugin.name, plugin.version or "-", api, plugin.state.value, plugin.cause)
        table.add_row(*(Text(cell) for cell in cells))  # Text: foreign words are no markup
    return table
