"""Follows docs/how-to/publish-a-backend.md to the letter, in an environment made from wheels.

So it also proves `lmcache-core new-plugin`: that what it makes is complete, and passes the suite as it is.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fresh_environment import ROOT, FreshEnvironment
from less_effort import try_less_hard
from store_and_load import PROGRAM

from lmcache_core_conformance.network import ServerProcess, free_ports

PAGE = (ROOT / "docs" / "how-to" / "publish-a-backend.md").read_text(encoding="utf-8")
DEPOT_SERVER = ROOT / "tests" / "support" / "depot_server.py"
BY_OTHER_MEANS = {"cd", "pip", "python -m build", "twine"}
"""How commands begin that are not run as such: wheels are installed, and nothing is uploaded."""


def commands() -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [line for language, block in blocks if not language for line in block.splitlines()]


def command(start: str) -> list[str]:
    [found] = [line for line in commands() if line.startswith(start)]
    return shlex.split(found)


def files() -> dict[str, str]:
    """The page's code blocks whose first line is a comment with a path, by that path."""
    return dict(re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    environment = FreshEnvironment(tmp_path_factory.mktemp("fresh"))
    environment.install(ROOT, ROOT / "conformance", ROOT / "plugins" / "cpu")
    return environment


@pytest.fixture(scope="module")
def project(environment: FreshEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is generated, installed."""
    place = tmp_path_factory.mktemp("author")
    environment.run(*command("lmcache-core new-plugin"), cwd=place)
    [project] = place.iterdir()
    assert command("cd") == ["cd", project.name]
    environment.install(project, extra="test")
    (project / "cache.yaml").write_text(files()["cache.yaml"])
    return project


def verdicts_in(summary: str) -> set[str]:
    """The kinds of verdict in a summary line. On a busy machine some figure may be below its floor."""
    return set(re.findall(r"\d+ (passed|failed|unproven|not applicable|deviation|skipped|error)", summary))


def verdicts_of(output: str) -> set[str]:
    """Those of a run of the command."""
    [summary] = [line for line in output.splitlines() if line.startswith("depot: ")]
    return verdicts_in(summary)


def test_every_command_of_the_page_is_known_here() -> None:
    run = ("lmcache-core new-plugin", "pytest ", "lmcache-core conformance run", "lmcache-core plugins")
    run += ("lmcache-core config check",)
    others = [line for line in commands() if not line.startswith((*run, *BY_OTHER_MEANS))]
    assert others == []


def test_a_new_plugin_passes_its_own_tests_with_nothing_unproven(
    environment: FreshEnvironment, project: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(project, tmp_path / project.name)
    try_less_hard(copy / "tests" / "test_conformance.py", "DepotHarness")
    output = environment.run(*command("pytest"), "-p", "no:cacheprovider", cwd=copy)
    assert verdicts_in(output.splitlines()[-1]) == {"passed", "not applicable"}


def test_the_report_is_written(environment: FreshEnvironment, project: Path) -> None:
    arguments = [*command("lmcache-core conformance run"), "--strict", "--group", "sizes"]  # part of it
    assert verdicts_of(environment.run(*arguments, cwd=project)) == {"passed", "not applicable"}
    assert {"report.json", "report.html"} <= {path.name for path in project.iterdir()}


def test_the_plugin_is_listed_as_usable(environment: FreshEnvironment, project: Path) -> None:
    output = environment.run(*command("lmcache-core plugins"), cwd=project)
    table, _ = output.split("\n\n")
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["conformance", "0.1.0", "-", "ok"],
        ["cpu", "0.1.0", "1.0", "ok"],
        ["depot", "0.1.0", "1.0", "ok"],
    ]


def test_what_one_process_stores_in_it_another_loads(environment: FreshEnvironment, project: Path) -> None:
    checked = environment.run(*command("lmcache-core config check"), cwd=project)
    assert checked == "cache.yaml: ok: memory (cpu) -> shelf (depot), all opened\n"
    assert environment.run("python", "-c", PROGRAM, "store", cwd=project) == "992 True\n"
    assert environment.run("python", "-c", PROGRAM, "load", cwd=project) == "{'shelf': 992}\n"


def test_a_second_user_of_a_generated_stores_directory_is_refused(
    environment: FreshEnvironment, project: Path, tmp_path: Path
) -> None:
    holder = """
import subprocess, sys
from pathlib import Path
from lmcache_core_depot.driver import DepotDriver

def check():
    command = [Path(sys.executable).with_name("lmcache-core"), "config", "check", "--open", "cache.yaml"]
    return subprocess.run(command, capture_output=True, text=True)

driver = DepotDriver(Path("shelf"), None)
refused = check()
driver.close()
print(refused.returncode, refused.stderr, check().returncode)
"""
    shutil.copy(project / "cache.yaml", tmp_path)
    output = environment.run("python", "-c", holder, cwd=tmp_path)
    assert output.startswith("1 Error: cache.yaml")
    assert "another process uses" in output
    assert output.endswith(": give this one a directory of its own\n 0\n")


def test_a_second_plugin_of_that_name_is_refused(environment: FreshEnvironment, project: Path) -> None:
    with pytest.raises(AssertionError, match="lmcache-core-depot is installed and has a plugin named"):
        environment.run(*command("lmcache-core new-plugin"), cwd=project)
    assert not (project / "lmcache-core-depot").exists()


@pytest.mark.parametrize(
    "checker",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "lmcache_core_depot"],
    ],
    ids=["ruff", "format", "mypy"],
)
def test_the_generated_code_is_clean(project: Path, checker: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *checker],
        cwd=ROOT if checker[0] == "mypy" else project,  # the repository's settings, and what mypy knows of it
        env={"MYPYPATH": str(project / "src"), "PATH": "", "RUFF_NO_CACHE": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_generated_ci_certifies_and_keeps_the_report(project: Path) -> None:
    workflow = yaml.safe_load((project / ".github" / "workflows" / "ci.yml").read_text())
    steps = [shlex.split(step.get("run", "")) for step in workflow["jobs"]["conformance"]["steps"]]
    assert command("pytest") in steps
    assert command("lmcache-core conformance run") in steps


# --- the asynchronous example


@pytest.fixture(scope="module")
def asynchronous(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the page's files in place of the generated ones; to be put on the path.

    Its harness is the page's, trying less hard.
    """
    changed = tmp_path_factory.mktemp("changed") / project.name
    shutil.copytree(project, changed)
    replaced = {path: text for path, text in files().items() if path != "cache.yaml"}
    for path, text in replaced.items():
        assert (changed / path).exists()
        (changed / path).write_text(text, encoding="utf-8")
    try_less_hard(changed / "tests" / "test_conformance.py", "DepotHarness")
    return changed


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """That of a server."""
    [port] = free_ports(1)
    server = ServerProcess([sys.executable, DEPOT_SERVER, str(port)], ready="serving")
    server.start()
    yield port
    server.kill()


def test_the_asynchronous_backend_passes_everything_with_the_pages_harness(
    environment: FreshEnvironment, asynchronous: Path
) -> None:
    output = environment.run(
        *[*command("lmcache-core conformance run"), "--strict"],
        cwd=asynchronous,
        PYTHONPATH=str(asynchronous / "src"),
        PYTHONWARNINGS="error",
        DEPOT_SERVER=str(DEPOT_SERVER),
    )
    assert verdicts_of(output) == {"passed", "not applicable"}


def test_the_pages_harness_is_a_test_module(environment: FreshEnvironment, asynchronous: Path) -> None:
    output = environment.run(
        *["pytest", "-q", "-p", "no:cacheprovider", "-k", "absent or stored or killed"],
        cwd=asynchronous,
        PYTHONPATH=str(asynchronous / "src"),
        DEPOT_SERVER=str(DEPOT_SERVER),
    )
    assert " passed" in output.splitlines()[-1]
    assert "failed" not in output.splitlines()[-1]


def test_what_one_engine_stores_through_the_asynchronous_backend_another_loads(
    environment: FreshEnvironment, asynchronous: Path, port: int, tmp_path: Path
) -> None:
    options = f"{{host: 127.0.0.1, port: {port}, space: fleet}}"
    tier = f"{{name: depot, backend: depot, capacity: 64MiB, options: {options}}}"
    (tmp_path / "cache.yaml").write_text(f"tiers:\n  - {tier}\n")
    for action, printed in (("store", "992 True\n"), ("load", "{'depot': 992}\n")):
        output = environment.run(
            *["python", "-W", "error", "-c", PROGRAM, action],
            cwd=tmp_path,
            PYTHONPATH=str(asynchronous / "src"),
        )
        assert output == printed
