"""The public surface of the SDK changes only together with the version that says so."""

from __future__ import annotations

import difflib
import re
import runpy
from collections.abc import Iterable
from pathlib import Path

import pytest

from lmcache_core import sdk

ROOT = Path(__file__).parents[2]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate_sdk.py"))
REGENERATE = f"`{GENERATE['COMMAND']}`"
RECORD = "tests/unit/sdk_surface.txt"


def recorded() -> list[str]:
    return (ROOT / RECORD).read_text(encoding="utf-8").splitlines()


def test_the_surface_is_the_recorded_one() -> None:
    current = GENERATE["surface"]()
    if current == recorded():
        return
    needed = ".".join(map(str, GENERATE["needed_version"](recorded(), current)))
    diff = "\n".join(difflib.unified_diff(recorded(), current, RECORD, "lmcache_core.sdk", "", "", n=0))
    pytest.fail(
        f"what plugins rely on has changed:\n{diff}\n\n"
        "Undo that, or decide on a version: what is only added needs a new minor version of the contract, "
        f"what is changed, removed or abstract a new major one; so this needs at least {needed}. Set API in "
        "lmcache_core/storage/contract.py to it, add it to the table in docs/reference/compatibility.md, and "
        f"run {REGENERATE}, which writes {RECORD}. The rules are in docs/reference/compatibility.md."
    )


def test_the_sdk_reference_says_what_the_docstrings_say() -> None:
    page = ROOT / "docs" / "reference" / "sdk.md"
    assert page.read_text(encoding="utf-8") == GENERATE["render_sdk"](), f"stale: run {REGENERATE}"


def test_the_compatibility_page_lists_this_version_of_the_contract() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert f"\n| {sdk.API[0]}.{sdk.API[1]} | `lmcache-core` " in page


BEFORE = ["API 1.4", "cut(views) -> list", "Status.OK = 'ok'"]


@pytest.mark.parametrize(
    ("after", "needed"),
    [
        (BEFORE, (1, 4)),
        ([*BEFORE, "Status.BUSY = 'busy'"], (1, 5)),
        (["API 1.5", *BEFORE[1:], "Status.BUSY = 'busy'"], (1, 5)),
        ([*BEFORE, "abstract Backend.flush(self) -> None"], (2, 0)),
        (BEFORE[:2], (2, 0)),
        ([BEFORE[0], "cut(views, step) -> list", BEFORE[2]], (2, 0)),
    ],
    ids=["nothing", "added", "added and decided", "abstract", "removed", "changed"],
)
def test_the_kind_of_a_change_decides_the_version(after: list[str], needed: tuple[int, int]) -> None:
    assert GENERATE["needed_version"](BEFORE, after) == needed


def changed_lines() -> set[str]:
    return set(recorded()) ^ set(GENERATE["surface"]())


@pytest.mark.parametrize(
    ("target", "attribute", "value", "expected"),
    [
        (sdk, "__all__", [name for name in sdk.__all__ if name != "cut"], r"cut\(.*"),
        (sdk, "cut", lambda views: [], r"cut\(.*"),
        (sdk.Backend, "flush", lambda self: None, r"Backend\.flush\(self\)"),
        (
            sdk.BackendUnavailable,
            "retryable_by_default",
            False,
            r"BackendUnavailable\.retryable_by_default = .*",
        ),
    ],
    ids=["a name is gone", "another signature", "another method", "another default"],
)
def test_the_record_notices(
    target: object, attribute: str, value: object, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, attribute, value, raising=False)
    assert changed_lines()
    assert all(re.fullmatch(expected, line) for line in changed_lines())


def test_the_generator_records_no_change_that_the_version_does_not_admit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "surface.txt"
    old = [line for line in recorded() if not line.startswith("cut(")]
    record.write_text("\n".join(old) + "\n")
    main = GENERATE["main"]
    monkeypatch.setitem(main.__globals__, "SURFACE", record)
    monkeypatch.setitem(main.__globals__, "SDK_PAGE", tmp_path / "sdk.md")

    def run(arguments: Iterable[str]) -> None:
        monkeypatch.setattr("sys.argv", ["generate_sdk.py", *arguments])
        main()

    with pytest.raises(SystemExit, match=r"set API to \(1, 1\)"):
        run([])
    assert record.read_text().splitlines() == old
    run(["--decided"])
    assert record.read_text().splitlines() == recorded()
