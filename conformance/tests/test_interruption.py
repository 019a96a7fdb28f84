"""A run that is interrupted: everything is taken away again, and what is written says how far it came."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.cli import main
from lmcache_core.registry import BackendSpec, Registry
from lmcache_core_conformance import Verdict, command, describe, encode
from lmcache_core_conformance.html import headline
from lmcache_core_conformance.report import ReportDocument, parse
from lmcache_core_conformance.runner import Interrupted, Result, run

PROGRAM = """
import contextlib, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from lmcache_core.registry import BackendSpec, Registry
from lmcache_core_conformance import Verdict, command, describe, encode

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner may have it ignored

class Stuck(FileBackend):
    def stat_many(self, keys, call):
        print("inside", flush=True)
        threading.Event().wait()

class Kept(FileBackend):
    def stat_many(self, keys, call):
        ThreadPoolExecutor().submit(threading.Event().wait).result()

class KeptHarness(SmallHarness):
    limit_s = 0.5

    def __init__(self):
        super().__init__(Kept)

class StuckHarness(SmallHarness):
    limit_s = 60.0

    def __init__(self):
        super().__init__(Stuck)

class WaitsInFaults(SmallHarness):
    limit_s = 60.0

    def __init__(self):
        super().__init__(FileBackend)

    @contextlib.contextmanager
    def faulty(self, tmp, fault):
        marker = Path("the-fault-is-there")
        marker.touch()
        try:
            print("inside", flush=True)
            while True:
                threading.Event().wait(0.05)
            yield
        finally:
            marker.unlink()

if __name__ == "__main__":
    import program

    registry = Registry()
    for backend in (FileBackend, program.Stuck, program.Kept):
        name = backend.__name__.lower()
        registry.add(BackendSpec(name, f"{backend.__module__}:{backend.__name__}", (1, 0)), backend)
    command.discover = lambda: registry
    command.conformance()
"""


HARNESS = """
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend

class Mine(SmallHarness):
    def __init__(self):
        super().__init__(MemoryBackend)
"""
TESTS = """
from pathlib import Path
from program import WaitsInFaults
from lmcache_core_conformance import BackendConformance

class TestMine(BackendConformance):
    harness = WaitsInFaults()
    harness.directory = Path("stores")
"""
_FILES = ("--directory", "stores", "--report", "out.json", "--html", "out.html")


@dataclass
class Ended:
    """What an interrupted run left."""

    code: int
    told: str
    report: ReportDocument
    page: str


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command with these arguments, in a directory with the report of an earlier run."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "stores").mkdir()
    (tmp_path / "out.json").write_text('{"format": "lmcache-core-conformance-report"}')
    return started(tmp_path, "program.py", "run", *arguments, *_FILES)


def started(tmp_path: Path, *command_line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command_line],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told_until_inside(process: subprocess.Popen[str]) -> str:
    """What it tells until it is inside the backend or hook that waits."""
    assert process.stdout is not None
    told = ""
    for line in process.stdout:
        told += line
        if line.endswith("inside\n"):
            break
    return told


def end_of(process: subprocess.Popen[str]) -> str:
    """What it tells until its end, which comes by itself."""
    try:
        told, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return told


def interrupted(tmp_path: Path, number: signal.Signals, *arguments: str) -> Ended:
    """Runs the command until it is inside the backend or hook that waits, and sends the signal."""
    process = start(tmp_path, *arguments)
    told = told_until_inside(process)
    process.send_signal(number)
    told += end_of(process)
    report = parse((tmp_path / "out.json").read_bytes())
    return Ended(process.returncode, told, report, (tmp_path / "out.html").read_text())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_undoes_its_fault_and_reports_how_far_it_came(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    harness = ("--harness", "program:WaitsInFaults")
    ended = interrupted(tmp_path, number, "--backend", "filebackend", "--group", "deadline", *harness)
    assert ended.code == code, ended.told
    assert "interrupted: the rest was not run" in ended.told
    assert "Traceback" not in ended.told
    assert not (tmp_path / "the-fault-is-there").exists()
    assert list((tmp_path / "stores").iterdir()) == []
    assert ended.report.interrupted
    assert not ended.report.suite.complete
    assert [result.name for result in ended.report.results][:1] == ["test_an_expired_call_changes_nothing"]
    assert "The run was interrupted before its end." in ended.page


def test_a_backend_that_never_returns_does_not_keep_an_interrupted_run_from_ending(tmp_path: Path) -> None:
    harness = ("--harness", "program:StuckHarness")
    ended = interrupted(tmp_path, signal.SIGTERM, "--backend", "stuck", "--group", "round-trip", *harness)
    assert ended.code == 143, ended.told
    assert list((tmp_path / "stores").iterdir()) == []
    assert ended.report.interrupted


def test_interrupting_pytest_leaves_nothing_behind_either(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "test_mine.py").write_text(TESTS)
    (tmp_path / "stores").mkdir()
    process = started(tmp_path, "-m", "pytest", "-q", "-s", "-k", "stalled", "-p", "no:cacheprovider")
    told = told_until_inside(process)
    process.send_signal(signal.SIGINT)
    told += end_of(process)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, told
    assert not (tmp_path / "the-fault-is-there").exists()
    assert list((tmp_path / "stores").iterdir()) == []


def test_threads_that_never_end_do_not_keep_the_command_from_ending(tmp_path: Path) -> None:
    process = start(
        tmp_path, "--backend", "kept", "--group", "round-trip", "--harness", "program:KeptHarness"
    )
    told = end_of(process)
    assert process.returncode == 1, told
    assert "still running after 0.5 s" in told
    assert parse((tmp_path / "out.json").read_bytes()).of(Verdict.FAILED)
    assert list((tmp_path / "stores").iterdir()) == []


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
def harness_file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "certified_here.py"
    file.write_text(HARNESS)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner may have it ignored
    yield file
    signal.signal(signal.SIGINT, before)


def run_memory(monkeypatch: pytest.MonkeyPatch, harness: str, report: Path) -> tuple[int, str]:
    """The command in this process, on a backend in memory, with the report of an earlier run."""
    registry = Registry()
    registry.add(BackendSpec("memory", "conformance_backends.memory:MemoryBackend", (1, 0)), MemoryBackend)
    monkeypatch.setattr(command, "discover", lambda: registry)
    report.write_text('{"format": "lmcache-core-conformance-report"}')
    arguments = ["run", "--backend", "memory", "--harness", harness, "--report", str(report)]
    ended = CliRunner().invoke(command.conformance, [*arguments, "--group", "round-trip"])
    return ended.exit_code, ended.output


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_whose_exception_is_swallowed_ends_the_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, harness_file: Path, number: signal.Signals, code: int
) -> None:
    def swallow(*arguments: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(command, "_show", swallow)
    report = harness_file.with_name("out.json")
    ended, told = run_memory(monkeypatch, f"{harness_file}:Mine", report)
    assert ended == code, told
    document = parse(report.read_bytes())
    assert document.interrupted
    assert len(document.results) == 1


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_run_that_is_interrupted_before_it_begins_leaves_no_report(
    monkeypatch: pytest.MonkeyPatch, harness_file: Path, number: signal.Signals, code: int
) -> None:
    harness_file.write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    report = harness_file.with_name("out.json")
    ended, told = run_memory(monkeypatch, f"{harness_file}:Mine", report)
    assert (ended, told) == (code, "interrupted: nothing is reported\n")
    assert not report.exists()


def test_ctrl_c_while_a_command_is_imported_ends_it_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "import_module", stop)
    assert CliRunner().invoke(main.main, ["plugins"]).exit_code == 130


def test_a_program_gets_what_was_run_before_it_was_interrupted() -> None:
    def stop(result: Result) -> None:
        if result.prop.name == "test_reading_twice_gives_the_same_bytes":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(SmallHarness(MemoryBackend), groups=["round-trip"], on_result=stop)
    assert caught.value.report.interrupted
    assert caught.value.report.results[-1].prop.name == "test_reading_twice_gives_the_same_bytes"


def test_reports_of_interrupted_runs_are_not_compared(tmp_path: Path) -> None:
    harness = SmallHarness(MemoryBackend)
    whole = describe(run(harness, groups=["sizes"]), harness)
    cut = msgspec.structs.replace(whole, interrupted=True)
    assert headline(cut)[1] == "What was run passed. The run was interrupted before its end."
    files = [tmp_path / "whole.json", tmp_path / "cut.json"]
    for file, document in zip(files, (whole, cut), strict=True):
        file.write_bytes(encode(document))
    result = CliRunner().invoke(command.conformance, ["compare", *map(str, files)])
    assert result.exit_code == 2
    assert "a run that was interrupted says nothing of what it did not reach" in result.output
