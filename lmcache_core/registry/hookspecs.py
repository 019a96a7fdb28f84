"""The hooks that a plugin implements, in the entry-point group `lmcache_core`.

A plugin is a module (or object) named by an entry point:

    [project.entry-points.lmcache_core]
    mystore = "my_distribution.plugin"

The entry point has the name of one of the backends it offers: by that name it is known while it can't
be loaded. The module decorates functions with `lmcache_core.sdk.hookimpl`. Importing it must stay cheap:
no driver, no I/O. Each entry point is loaded by itself, so that a broken one disturbs nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from lmcache_core.registry.specs import BackendSpec

if TYPE_CHECKING:
    import click

PROJECT = "lmcache_core"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook of the same name."""


@hookspec
def lmcache_backends() -> list[BackendSpec]:  # type: ignore[empty-body]
    """The storage backends of this plugin.

    Called once each time the plugins are discovered: when an engine is built, by `config check` and
    by `plugins`.
    """


@hookspec
def lmcache_commands() -> list[click.Command]:  # type: ignore[empty-body]
    """Commands to add to `lmcache-core`.

    Called when the command line needs them: for `--help`, or for a name the core doesn't have.
    """
