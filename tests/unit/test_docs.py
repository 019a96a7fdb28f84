from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])


def test_the_config_reference_says_what_the_config_classes_say() -> None:
    render = runpy.run_path(str(ROOT / "docs" / "generate.py"))["render_config"]
    page = ROOT / "docs" / "reference" / "config.md"
    assert page.read_text(encoding="utf-8") == render(), "stale: run `python docs/generate.py`"


def test_the_plugins_readmes_say_what_their_config_classes_say() -> None:
    docs = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for page, config_class in docs["READMES"].items():
        text = page.read_text(encoding="utf-8")
        assert text == docs["render_readme"](text, config_class), "stale: run `python docs/generate.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
    if DOCS in page.parents:  # the site is made of this folder alone, and mkdocs refuses what leads out of it
        assert [target for target in targets if DOCS not in (page.parent / target).resolve().parents] == []


def test_the_readme_leads_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_block = re.search(r"```\w*\n(.*?)```", text, re.DOTALL)
    assert first_block is not None
    commands = [line.partition("#")[0].strip() for line in first_block[1].strip().splitlines()]
    assert commands == ["make demo", "make test"]
