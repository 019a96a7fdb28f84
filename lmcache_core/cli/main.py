"""The command `lmcache-core`: its own commands and those of plugins, each imported when it is run."""

from __future__ import annotations

import errno
import signal
import sys
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from lmcache_core.errors import LMCacheError, PluginError

_COMMANDS = {
    "bench": ("lmcache_core.cli.bench", "Measure what this machine and a config give."),
    "config": ("lmcache_core.cli.config", "Check a config file, or print the schema for editors."),
    "demo": ("lmcache_core.cli.demo", "Answer questions with a real model, cold and from the cache."),
    "explain": ("lmcache_core.cli.explain", "Say which model field, chunk or tier makes a miss."),
    "new-plugin": ("lmcache_core.cli.new_plugin", "Make a package for a backend of your own."),
    "plugins": ("lmcache_core.cli.plugins", "List the installed plugins and what is wrong with any."),
}


class _LazyGroup(click.Group):
    """Knows its commands by name; imports one when it runs. Plugins are asked only for other names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*(command.name for command in _plugin_commands() if command.name), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """
        Raises:
            PluginError: the command is that of a plugin which is broken: says the cause; or of several.
        """
        if cmd_name not in _COMMANDS:
            found = [command for command in _plugin_commands() if command.name == cmd_name]
            if len(found) > 1:
                raise PluginError(f"{len(found)} plugins offer a command {cmd_name!r}: uninstall all but one")
            if not found:
                _check_that_none_is_broken(cmd_name)
            return found[0] if found else None
        command = import_module(_COMMANDS[cmd_name][0]).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{_COMMANDS[cmd_name][0]}.command is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:  # click itself knows no names of ours to suggest
            close = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not close or isinstance(error, click.NoSuchOption):
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {str(command.name): command.get_short_help_str() for command in _plugin_commands()}
        rows |= {name: short_help for name, (_, short_help) in _COMMANDS.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))

    def main(self, *arguments: Any, **named: Any) -> Any:
        """Runs the command line and ends the process; where the output can't be written, with exit code 1.

        What is wrong is then one line; nothing where the reader of a pipe wants no more. What the terminal's
        encoding lacks, of a path say, is written as an escape.
        """
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*arguments, **named)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # not at the interpreter's end, which nothing could catch
        except OSError as error:
            if not _output_fails():
                raise
            sys.stdout = None  # where what is kept back would fail once more
            if error.errno != errno.EPIPE:
                click.echo(f"Error: the output can't be written: {error.strerror}", err=True)
            raise SystemExit(1) from error

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command; an error of ours ends in its message and exit code 1, without a traceback.

        Ctrl-C ends in the exit code that shells expect, also while a command is imported.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)
        except LMCacheError as error:
            raise click.ClickException(str(error)) from error


def _output_fails() -> bool:
    """Whether nothing can be written to the output: tells its errors from those of other files."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _plugin_commands() -> tuple[click.Command, ...]:
    from lmcache_core.registry import discover  # scanning the installed distributions takes a while

    return discover().commands


def _check_that_none_is_broken(name: str) -> None:
    """
    Raises:
        PluginError: a plugin of that name can't be used, and so its command isn't there.
    """
    from lmcache_core.registry import discover

    for plugin in discover().plugins:
        if plugin.name == name and plugin.cause:
            raise PluginError(f"the plugin {name!r} can't be used ({plugin.state.value}): {plugin.cause}")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lmcache-core", prog_name="lmcache-core")
def main() -> None:
    """Keeps the KV caches of language models in a chain of storage tiers."""


if __name__ == "__main__":
    main()
