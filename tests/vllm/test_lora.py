"""Two LoRA adapters with one name and other bytes share no KV, with each other or with the base model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_adapters import RANK, save_adapter
from vllm_session import Answer, Engine, Request, idle, tokens

PROMPT = tokens(700, seed=31)
WHOLE = 640


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(model: Path, log: Path, kv: Path) -> Iterator[Engine]:
    cache = {
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": str(kv)}},
        ]
    }
    with Engine(model, log, cache, enable_lora=True, max_lora_rank=RANK, max_loras=2) as engine:
        yield engine


def ask(engine: Engine, number: int, folder: Path) -> Answer:
    """With an adapter that always has the same name."""
    [answer] = engine.generate(Request(PROMPT, adapter=("tuned", number, str(folder))))
    assert answer.reason == "length"
    return answer


def test_adapters_share_with_themselves_only(engine: Engine, plain: Engine, tmp_path: Path) -> None:
    first, second = save_adapter(tmp_path / "first", seed=1), save_adapter(tmp_path / "second", seed=2)
    [base] = engine.generate(Request(PROMPT))
    cold = [ask(engine, 1, first), ask(engine, 2, second)]
    assert [answer.cached for answer in cold] == [0, 0]
    assert base.tokens == plain.generate(Request(PROMPT))[0].tokens
    assert len({tuple(answer.tokens) for answer in (base, *cold)}) == 3
    for source in ("cpu", "disk"):
        warm = [ask(engine, 1, first), ask(engine, 2, second), *engine.generate(Request(PROMPT))]
        assert [answer.cached for answer in warm] == [WHOLE] * 3, source
        assert [answer.tokens for answer in warm] == [answer.tokens for answer in (*cold, base)], source
        assert idle(engine)
        engine.ask("clear", "cpu")


def test_a_copy_of_an_adapter_shares_with_it(engine: Engine, tmp_path: Path) -> None:
    first = save_adapter(tmp_path / "first", seed=3)
    cold = ask(engine, 3, first)
    copied = ask(engine, 4, Path(shutil.copytree(first, tmp_path / "elsewhere")))
    assert (cold.cached, copied.cached) == (0, WHOLE)
    assert copied.tokens == cold.tokens


def test_other_bytes_under_the_path_of_an_adapter_share_nothing_with_it(
    engine: Engine, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "tuned", seed=5)
    before = ask(engine, 5, folder)
    assert ask(engine, 5, folder).cached == WHOLE
    save_adapter(folder, seed=6)
    assert ask(engine, 5, folder).cached == 0  # vLLM has the old ones loaded, and may load the new ones
    anew = ask(engine, 6, folder)
    assert anew.cached == 0
    assert anew.tokens != before.tokens
    again = ask(engine, 6, folder)
    assert (again.cached, again.tokens) == (WHOLE, anew.tokens)
