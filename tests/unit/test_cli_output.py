"""The command line where its output can't be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

PRINTS = """\
import click
from lmcache_core.cli import main as cli
command = click.Command("words", callback=lambda: print("words"))
cli._COMMANDS["words"] = ("__main__", "")
cli.main(["words"])
"""
FULL = "Error: the output can't be written: No space left on device\n"


def run(
    *arguments: str, output: int = subprocess.PIPE, environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Runs Python in a process of its own: its exit code, output and errors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        timeout=120,
        check=False,
    )
    return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()


COMMANDS = [
    ("-m", "lmcache_core", "--version"),
    ("-m", "lmcache_core", "config", "schema"),  # through click
    ("-m", "lmcache_core", "plugins"),  # through rich
    ("-c", PRINTS),  # kept back until the end
]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_output_to_a_full_device_ends_in_one_line_and_exit_code_1(
    command: Sequence[str], unbuffered: str
) -> None:
    with open("/dev/full", "wb") as full:
        environment = {"PYTHONUNBUFFERED": unbuffered}
        code, _, errors = run(*command, output=full.fileno(), environment=environment)
    assert (code, errors) == (1, FULL)


@pytest.mark.parametrize("command", COMMANDS)
def test_output_to_a_pipe_that_nobody_reads_ends_quietly(command: Sequence[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        code, _, errors = run(*command, output=theirs, environment={"PYTHONUNBUFFERED": ""})
    finally:
        os.close(theirs)
    assert (code, errors) == (1, "")


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output() -> None:
    code, _, errors = run("-c", PRINTS.replace('print("words")', 'open("/no/such/file")'))
    assert code == 1
    assert errors.endswith("FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'\n")
