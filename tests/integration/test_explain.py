"""`explain`: which part, salt or adapter of one model has what another lacks."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_scenario import (
    CHUNK,
    MODEL,
    PART,
    OracleKV,
    config_of,
    cpu,
    disk,
    engine_of,
    prompt,
    settle,
    store,
)

from lmcache_core.config import load_config
from lmcache_core.engine import Explanation, explain
from lmcache_core.identity import Part

TOKENS = prompt(91, 3 * CHUNK + 16)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, object]:
    """Of tiers that hold `TOKENS`, and the start of them under a salt and an adapter."""
    config = config_of(cpu(), disk(tmp_path))
    with engine_of(config) as engine:
        store(engine, TOKENS)
        start = TOKENS[: 2 * CHUNK]
        for names in ({"salt": b"a tenant"}, {"lora": b"l" * 32}):
            engine.store(engine.content(start, **names), OracleKV(start))
        settle(engine)
    return config


def ask(config: dict[str, object], *parts: Part, **options: Any) -> Explanation:
    return explain(load_config(config), TOKENS, model=MODEL, parts=parts, **options)


def test_a_part_that_isnt_the_one_stored_is_told_by_what_a_frame_shows(config: dict[str, object]) -> None:
    asked = replace(PART, content_format="other", layers=(0, PART.num_layers + 1))
    found = ask(config, asked)
    assert found.verdict == (
        f"Another part of this model holds {len(TOKENS)} of these tokens, the one asked about 0; they differ "
        "in: part.content_format, part.num_layers."
    )
    [mine] = found.models
    assert mine.other_part is not None
    assert mine.other_part.digest == PART.digest
    assert [(each.ours, each.theirs) for each in mine.other_part.differences] == [
        ("other", PART.content_format),
        (PART.num_layers + 1, PART.num_layers),
    ]


def test_a_part_that_looks_alike_is_told_as_other_layers_or_heads(config: dict[str, object]) -> None:
    first, end = PART.heads
    found = ask(config, replace(PART, heads=(first + 8, end + 8)))
    assert "they differ in: other layers, heads or attention group." in found.verdict


def test_all_parts_asked_for_are_needed(config: dict[str, object]) -> None:
    assert ask(config, PART).verdict.startswith("It is a hit")
    found = ask(config, PART, replace(PART, content_format="other"))
    assert found.models[0].num_tokens == 0


WINDOW = replace(PART, group="window")
STARTS = {WINDOW.digest: lambda num_tokens: max(0, num_tokens - CHUNK) // CHUNK * CHUNK}


def keep(config: dict[str, object], window: array[int], *, skip: int = 0) -> None:
    """Of layers with a window, beside those whose KV is there already."""
    with engine_of(config) as engine:
        mask = [place >= skip for place in range(len(window))]
        engine.beside(WINDOW).store(engine.content(window), OracleKV(window), mask=mask)
        settle(engine)


def test_of_a_window_only_what_the_end_of_a_hit_needs_must_be_there(config: dict[str, object]) -> None:
    keep(config, TOKENS, skip=2 * CHUNK)
    assert ask(config, PART, WINDOW, starts=STARTS).verdict.startswith("It is a hit")


def test_a_window_that_was_lost_ends_the_hit_where_all_layers_have_theirs(config: dict[str, object]) -> None:
    keep(config, TOKENS[: 2 * CHUNK])
    found = ask(config, PART, WINDOW, starts=STARTS)
    assert (found.models[0].num_tokens, found.models[0].window) == (2 * CHUNK, WINDOW.digest)
    assert found.verdict.startswith(
        f"{2 * CHUNK} of {len(TOKENS)} tokens are a hit; of what follows, layers with a window lack KV"
    )


def test_other_layers_of_the_same_engine_are_not_another_part(tmp_path: Path) -> None:
    config = config_of(cpu(), disk(tmp_path))
    with engine_of(config) as engine:
        store(engine, TOKENS[:CHUNK])
        settle(engine)
    keep(config, TOKENS)
    found = ask(config, PART, WINDOW, starts=STARTS)
    assert found.models[0].other_part is None
    assert found.verdict.startswith(f"{CHUNK} of {len(TOKENS)} tokens are held; the first piece")


def test_where_else_the_tokens_are_is_told_if_more_of_them_are_there(config: dict[str, object]) -> None:
    tried = {"no salt": (b"", b""), "an adapter": (b"l" * 32, b""), "another": (b"o" * 32, b"")}
    found = ask(config, PART, salt=b"a tenant", otherwise=tried)
    assert found.models[0].num_tokens == 2 * CHUNK
    assert found.models[0].otherwise == {"no salt": len(TOKENS)}
    assert found.verdict.startswith(f"{len(TOKENS)} of these tokens are held, but under no salt; {2 * CHUNK}")
    unheard = ask(config, PART, salt=b"unheard of", otherwise=tried)
    assert unheard.models[0].otherwise == {"no salt": len(TOKENS), "an adapter": 2 * CHUNK}
    assert ask(config, PART, otherwise=tried).models[0].otherwise == {}


def test_a_prompt_s_end_counts_in_the_units_that_it_is_stored_in(config: dict[str, object]) -> None:
    longer = [*TOKENS, *prompt(92, 15)]
    options: dict[str, Any] = {"model": MODEL, "parts": [PART]}
    assert explain(load_config(config), longer, **options).verdict.startswith("It is a hit")
    more = [*TOKENS, *prompt(92, 18)]
    assert not explain(load_config(config), more, **options).verdict.startswith("It is a hit")
    assert explain(load_config(config), more, unit_tokens=48, **options).verdict.startswith("It is a hit")
