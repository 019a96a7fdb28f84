"""`lmcache-core conformance`: what it certifies, what it writes, and what each exit code means."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner, Result

from conformance_backends.broken_conduct import CountsAttempts
from conformance_backends.broken_performance import ReadsInTinyPieces
from conformance_backends.files import FileBackend
from conformance_backends.memory import MemoryBackend
from lmcache_core.errors import BackendUnavailable
from lmcache_core.registry import BackendSpec, Registry
from lmcache_core.storage.contract import Call, Capabilities, Host, Item
from lmcache_core.storage.secret import Secret
from lmcache_core_conformance import Harness, Verdict, command
from lmcache_core_conformance.configured import ConfiguredHarness, RunConfig
from lmcache_core_conformance.report import encode, parse

ROUND_TRIP = "test_a_value_comes_back_byte_for_byte"
SMALL = "{options: {max_value_bytes: 65536}, capacity: 8MiB, small_capacity: 1MiB, large_value: 1MiB}"
EARLIER = '{"format": "lmcache-core-conformance-report"}'
HARNESS = """
from beside import name_of_the_directory as one
from .beside import name_of_the_directory as the_same
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core_conformance import Deviation

class MyHarness(SmallHarness):
    def __init__(self):
        super().__init__(MemoryBackend)

class Deviating(MyHarness):
    deviations = (Deviation("test_stats_count_what_is_stored", ""),)

class Hasty(MyHarness):
    rounds = 0

a_number = 7
"""


class Closed(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        raise BackendUnavailable("nobody listens there")


class Chatty(MemoryBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        logging.getLogger(__name__).warning("somebody took my value")
        super().put_many(items, call)


class LoginConfig(msgspec.Struct, frozen=True, kw_only=True):
    password: Secret


class TellsItsPassword(MemoryBackend):
    config_class = LoginConfig  # type: ignore[assignment]

    def __init__(self, config: LoginConfig) -> None:  # type: ignore[override]
        super().__init__(MemoryBackend.config_class())
        self.password = config.password.reveal()

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        raise BackendUnavailable(f"{self.password} was refused")


class ClosedToItsPassword(TellsItsPassword):
    def open(self, host: Host) -> Capabilities | None:
        raise BackendUnavailable(f"{self.password} was refused")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    registry = Registry()
    backends = {
        "memory": MemoryBackend,
        "attempts": CountsAttempts,
        "file": FileBackend,
        "closed": Closed,
        "slow": ReadsInTinyPieces,
        "chatty": Chatty,
        "telling": TellsItsPassword,
        "closed-telling": ClosedToItsPassword,
    }
    for name, backend in backends.items():
        registry.add(BackendSpec(name, f"{backend.__module__}:{backend.__name__}", (1, 0)), backend)
    monkeypatch.setattr(command, "discover", lambda: registry)

    def run(*arguments: object) -> Result:
        return call("run", *arguments)

    def call(*arguments: object) -> Result:
        result = CliRunner().invoke(command.conformance, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return SimpleNamespace(run=run, call=call)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "harness.yaml"
    file.write_text(SMALL)
    return file


@pytest.fixture
def harness_file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("name_of_the_directory = __file__\n")
    file = tmp_path / "my_harness.py"
    file.write_text(HARNESS)
    return file


def test_an_installed_backend_is_certified(invoke: SimpleNamespace, small: Path) -> None:
    result = invoke.run("--backend", "memory", "--config", small, "--group", "sizes")
    assert result.exit_code == 0, result.output
    assert "memory: 6 passed" in result.output


def test_a_failed_property_ends_in_exit_code_1_and_says_why_it_matters(
    invoke: SimpleNamespace, small: Path
) -> None:
    result = invoke.run("--backend", "attempts", "--config", small, "--group", "honesty")
    assert result.exit_code == 1
    assert "1 failed" in result.output
    assert "why it matters: Operators size tiers" in " ".join(result.output.split())


def test_unproven_properties_count_only_when_strict_and_the_hook_is_named(
    invoke: SimpleNamespace, tmp_path: Path
) -> None:
    config = tmp_path / "file.yaml"
    config.write_text("{options: {path: '{tmp}/values'}, capacity: 8MiB}")
    arguments = ("--backend", "file", "--config", config, "--group", "lifecycle")
    relaxed = invoke.run(*arguments)
    assert relaxed.exit_code == 0, relaxed.output
    assert "1 unproven: harness hook `unopenable_config` is missing" in relaxed.output
    assert invoke.run(*arguments, "--strict").exit_code == 1


def test_floors_fail_only_when_they_are_enforced(
    invoke: SimpleNamespace, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Harness, "measurements", 2)  # it is slower by far
    arguments = ("--backend", "slow", "--config", small, "--group", "performance")
    reported = invoke.run(*arguments)
    assert reported.exit_code == 0, reported.output
    assert "below the floor of 0.5" in reported.output
    assert "passed (below floor)  performance: reading keeps up with the bare medium" in reported.output
    assert re.search(r"slow: 3 passed \([123] below floor\), in ", reported.output)
    assert invoke.run(*arguments, "--enforce-performance").exit_code == 1


def test_report_and_page_are_written_and_say_what_was_seen(
    invoke: SimpleNamespace, small: Path, tmp_path: Path
) -> None:
    report, page = tmp_path / "out.json", tmp_path / "out.html"
    result = invoke.run(
        *("--backend", "attempts", "--config", small, "--group", "honesty"),
        *("--report", report, "--html", page),
    )
    assert result.exit_code == 1
    document = parse(report.read_bytes())
    assert document.backend.name == "attempts"
    assert [failed.name for failed in document.of(Verdict.FAILED)] == ["test_stats_count_what_is_stored"]
    assert not document.suite.complete
    assert document.suite.reduced == ("capacity_bytes", "large_value_bytes", "small_capacity_bytes")
    assert "1 property failed." in page.read_text(encoding="utf-8")


def test_what_a_run_writes_is_there_whole_or_not_at_all(
    invoke: SimpleNamespace, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "kept" / "out.json"
    report.parent.mkdir()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    result = invoke.run("--backend", "memory", "--config", small, "--group", "sizes", "--report", report)
    assert result.exit_code == 2, result.output
    assert result.output.endswith(f"Error: can't write {report}: No space left on device\n")
    assert list(report.parent.iterdir()) == []


def test_a_report_is_written_where_a_link_leads(invoke: SimpleNamespace, small: Path, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(EARLIER)
    (tmp_path / "link").symlink_to("out.json")
    link = tmp_path / "link"
    invoke.run("--backend", "memory", "--config", small, "--group", "sizes", "--report", link)
    assert link.is_symlink()
    assert parse((tmp_path / "out.json").read_bytes()).backend.name == "memory"


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_no_file_but_an_earlier_report_is_replaced(
    invoke: SimpleNamespace, small: Path, tmp_path: Path, option: str
) -> None:
    arguments = ("--backend", "memory", "--config", small, "--group", "declaration", option)
    refused = invoke.run(*arguments, small)
    assert refused.exit_code == 2, refused.output
    assert "it is there, and no report of an earlier run" in refused.output
    assert small.read_text() == SMALL
    report = tmp_path / "out"
    report.touch()  # as mktemp does
    for _ in range(2):
        assert invoke.run(*arguments, report).exit_code == 0
    assert report.stat().st_size > 0


def test_a_store_that_is_in_use_is_not_opened(invoke: SimpleNamespace, tmp_path: Path) -> None:
    config = tmp_path / "file.yaml"
    config.write_text(f"options: {{path: {tmp_path / 'in-use'}}}")
    result = invoke.run("--backend", "file", "--config", config, "--group", "declaration")
    assert result.exit_code == 2, result.output
    assert "no option has {tmp} in it" in result.output
    assert not (tmp_path / "in-use").exists()


def test_a_harness_in_a_file_brings_its_own_hooks_and_its_neighbours(
    invoke: SimpleNamespace, harness_file: Path
) -> None:
    name = f"{harness_file}:MyHarness"
    result = invoke.run("--backend", "memory", "--harness", name, "--group", "sizes")
    assert result.exit_code == 0, result.output
    result = invoke.run("--backend", "attempts", "--harness", name)
    assert result.exit_code == 2
    assert "conformance_backends.memory:MemoryBackend" in result.output


def test_ill_listed_deviations_are_one_clear_error(invoke: SimpleNamespace, harness_file: Path) -> None:
    result = invoke.run("--backend", "memory", "--harness", f"{harness_file}:Deviating")
    assert result.exit_code == 2
    assert result.output == (
        "Error: Deviating.deviations gives no reason for test_stats_count_what_is_stored\n"
    )


def test_numbers_of_a_harness_that_say_no_effort_are_one_clear_error(
    invoke: SimpleNamespace, harness_file: Path
) -> None:
    result = invoke.run("--backend", "memory", "--harness", f"{harness_file}:Hasty")
    assert result.exit_code == 2
    assert result.output == "Error: Hasty.rounds must be positive and finite, not 0\n"


def test_reduced_effort_is_told_also_of_times(invoke: SimpleNamespace, tmp_path: Path) -> None:
    config = tmp_path / "patient.yaml"
    config.write_text("{capacity: 256MiB, deadline: 1h}")
    result = invoke.run("--backend", "memory", "--config", config, "--group", "sizes")
    assert "\neffort reduced: deadline_s\n" in result.output
    config.write_text("{}")
    result = invoke.run("--backend", "memory", "--config", config, "--group", "declaration")
    assert "effort reduced" not in result.output


def test_several_groups_may_be_chosen(invoke: SimpleNamespace, small: Path) -> None:
    groups = ("--group", "sizes", "--group", "destination")
    result = invoke.run("--backend", "memory", "--config", small, *groups)
    assert "sizes: " in result.output
    assert "destination: " in result.output
    assert "round-trip: " not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "memry"], "did you mean 'memory'?"),
        (["--backend", "memory", "--config", "absent.yaml"], "absent.yaml"),
        (["--backend", "memory", "--config", "unknown.yaml"], "did you mean 'options'?"),
        (["--backend", "memory", "--group", "sises"], "'sises' is not one of"),
        (["--backend", "file"], "options.path: required key is missing"),
        (["--backend", "closed"], "can't be opened: BackendUnavailable: nobody listens there"),
        (["--backend", "memory", "--report", "nowhere/out.json"], "there is no directory nowhere"),
        (["--backend", "memory", "--report", "."], "can't write .: it is a directory"),
        (["--backend", "memory", "--html", "unknown.yaml/x"], "there is no directory unknown.yaml"),
        (["--backend", "memory", "--report", "x" * 300], "File name too long"),
        (["--backend", "memory", "--report", "/dev/null"], "it is no regular file"),
        (["--backend", "memory", "--report", "/proc/out.json"], "can't write /proc/out.json: "),
        (["--backend", "memory", "--report", "out", "--html", "./out"], "are the same file, out"),
        (["--backend", "memory", "--report", "out", "--html", "link"], "are the same file, out"),
        (["--backend", "memory", "--directory", "/proc"], "can't write in /proc: "),
        (["--backend", "memory", "--harness", "nonsense"], "neither FILE.py:CLASS nor MODULE:CLASS"),
        (["--backend", "memory", "--harness", "absent.py:Mine"], "FileNotFoundError"),
        (["--backend", "memory", "--harness", "json:JSONDecoder"], "is a JSONDecoder, not a Harness"),
        (["--backend", "memory", "--harness", "a:B", "--config", "unknown.yaml"], "not both"),
        ([], "Missing option '--backend'"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else "",
)
def test_what_is_not_there_is_one_clear_error_and_exit_code_2(
    invoke: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unknown.yaml").write_text("opitons: {}\n")
    Path("link").symlink_to("out")
    result = invoke.run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert [line for line in result.output.splitlines() if "Error: " in line] == [
        result.output.splitlines()[-1]
    ]
    assert "passed" not in result.output


def test_what_a_backend_logs_does_not_drown_the_verdicts(invoke: SimpleNamespace, small: Path) -> None:
    root = logging.getLogger()
    handlers = list(root.handlers)
    root.handlers = []  # pytest's own: outside a test there are none, and warnings go to stderr
    try:
        result = invoke.run("--backend", "chatty", "--config", small, "--group", "destination")
    finally:
        root.handlers = handlers
    assert result.exit_code == 0, result.output
    assert "somebody took my value" not in result.output


@pytest.mark.parametrize(("backend", "exit_code"), [("telling", 1), ("closed-telling", 2)])
def test_no_secret_is_printed(invoke: SimpleNamespace, tmp_path: Path, backend: str, exit_code: int) -> None:
    config = tmp_path / "login.yaml"
    config.write_text("options: {password: correct horse}")
    result = invoke.run("--backend", backend, "--config", config, "--group", "round-trip")
    assert result.exit_code == exit_code, result.output
    assert "*** was refused" in result.output
    assert "horse" not in result.output


def test_comparing_two_reports_says_where_verdicts_differ(
    invoke: SimpleNamespace, small: Path, tmp_path: Path
) -> None:
    reports = [tmp_path / "good.json", tmp_path / "bad.json"]
    for backend, report in zip(("memory", "attempts"), reports, strict=True):
        invoke.run("--backend", backend, "--config", small, "--group", "honesty", "--report", report)
    same = invoke.call("compare", reports[0], reports[0])
    assert same.exit_code == 0, same.output
    assert same.output.startswith("the same ")
    different = invoke.call("compare", *reports)
    assert different.exit_code == 1
    memory, attempts = "conformance_backends.memory:Memory", "conformance_backends.broken_conduct:Counts"
    assert different.output == (
        f"backend differs: memory ({memory}Backend), then attempts ({attempts}Attempts)\n"
        "test_stats_count_what_is_stored: passed, then failed\n"
    )
    assert invoke.call("compare", reports[0], small).exit_code == 2


def test_comparing_says_what_else_differs_and_takes_no_empty_report(
    invoke: SimpleNamespace, small: Path, tmp_path: Path
) -> None:
    report, other = tmp_path / "one.json", tmp_path / "other.json"
    invoke.run("--backend", "memory", "--config", small, "--group", "sizes", "--report", report)
    document = parse(report.read_bytes())
    suite = msgspec.structs.replace(document.suite, version="9.9", effort={"rounds": 7})
    other.write_bytes(encode(msgspec.structs.replace(document, suite=suite)))
    compared = invoke.call("compare", report, other)
    assert compared.exit_code == 0, compared.output
    assert f"suite differs: {document.suite.version}, then 9.9\n" in compared.output
    assert ", then rounds 7\n" in compared.output
    other.write_bytes(encode(msgspec.structs.replace(document, results=())))
    empty = invoke.call("compare", other, other)
    assert empty.exit_code == 2
    assert "a report without results says nothing" in empty.output


def test_the_schema_is_printed(invoke: SimpleNamespace) -> None:
    schema = msgspec.json.decode(invoke.call("schema").output)
    assert schema["title"] == "lmcache-core-conformance-report"
    assert "PropertyResult" in schema["$defs"]


def test_options_may_name_the_directory_of_each_store(tmp_path: Path) -> None:
    config = RunConfig(options={"path": "{tmp}/cache", "depth": 2, "more": ["{tmp}"]})
    harness: Harness = ConfiguredHarness(MemoryBackend, config)
    assert harness.fresh_config(tmp_path) == {
        "path": f"{tmp_path}/cache",
        "depth": 2,
        "more": [str(tmp_path)],
    }
