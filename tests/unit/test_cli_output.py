"""The command line where its output can't be written, or the terminal's encoding lacks what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from lmcache_core.cli.demo_messages import Plan, Stage
from lmcache_core.cli.main import main

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PRINTS = """\
import click
from lmcache_core.cli import main as cli
command = click.Command("words", callback=lambda: print("words"))
cli._COMMANDS["words"] = ("__main__", "")
cli.main(["words"])
"""
FULL = "Error: the output can't be written: No space left on device\n"


def run(
    *arguments: str | Path,
    output: int = subprocess.PIPE,
    environment: dict[str, str] | None = None,
) -> tuple[int, str, str]:
    """Runs Python in a process of its own: its exit code, output and errors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
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


@pytest.mark.parametrize("name", [b"b\xe9d.yaml", "né.yaml".encode()])
@pytest.mark.parametrize(
    "environment",
    [ASCII, {"PYTHONIOENCODING": "ascii:strict"}, {"PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "1"}],
)
def test_a_path_that_the_terminal_lacks_characters_for_can_be_told(
    tmp_path: Path, environment: dict[str, str], name: bytes
) -> None:
    file = tmp_path / os.fsdecode(name)
    file.write_text("tiers: [{name: a, backend: cpu, capacity: 1MiB}]\n")
    code, output, errors = run("-m", "lmcache_core", "config", "check", file, environment=environment)
    assert (code, errors) == (0, "")
    assert output.endswith(".yaml: ok: a (cpu)\n")


def test_a_configured_path_that_the_file_system_cannot_name_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    tier = "{name: a, backend: disk, capacity: 1MiB, options: {path: /kv-é}}"
    file.write_text(f"tiers: [{tier}]\n", encoding="utf-8")
    code, output, errors = run("-m", "lmcache_core", "config", "check", file, environment=ASCII)
    assert (code, output) == (1, "")
    assert errors == (
        f"Error: {file}, line 1: tiers[0].options.path: '/kv-\\xe9' can't be a path where text is ascii: "
        "set LC_ALL=C.UTF-8, or choose another\n"
    )


def test_the_demo_refuses_a_directory_that_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"b\xe9d")
    result = CliRunner().invoke(main, ["demo", "--dir", str(folder)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {str(folder / 'config.yaml')!r} is not text in the encoding")


def test_the_demos_worker_tells_text_whatever_the_locale_is() -> None:
    code = """\
from lmcache_core.cli import demo_worker
from lmcache_core.cli.demo_messages import Stage
demo_worker.work = lambda plan, say: say(Stage(plan.config, 1.0))
demo_worker.main()
"""
    plan = Plan(phase="first", config="né", model=None, model_cache="", repeats=1, max_new_tokens=1)
    said = msgspec.json.encode(plan) + b"\n"
    expected = msgspec.json.encode(Stage("né", 1.0)).decode() + "\n"
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,  # open until it is done: it ends with whoever holds the other end
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ASCII},
    )
    with worker:
        assert worker.stdin
        assert worker.stdout
        assert worker.stderr
        worker.stdin.write(said)
        worker.stdin.flush()
        assert (worker.stdout.read().decode(), worker.stderr.read().decode()) == (expected, "")
    assert worker.returncode == 0
