"""vLLM is killed while it writes to the disk tier; the next one finds what was whole, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_session import Answer, Engine, Request, idle, tokens

WRITTEN = [Request(tokens(500 + 131 * i, seed=500 + i)) for i in range(3)]
CUT_OFF = [Request(tokens(900, seed=510 + i)) for i in range(3)]


def said(answers: list[Answer]) -> list[list[int]]:
    assert all(answer.reason == "length" for answer in answers)
    return [answer.tokens for answer in answers]


def serve(engine: Engine) -> None:
    """Until all is written: it may answer before."""
    engine.generate(*CUT_OFF)
    assert idle(engine)


def test_what_was_written_before_a_kill_is_found_after_it(
    model: Path, log: Path, plain: Engine, tmp_path: Path
) -> None:
    expected = [said(plain.generate(request))[0] for request in (*WRITTEN, *CUT_OFF)]
    cache = {
        "chunk_tokens": 256,
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": str(tmp_path)}},
        ],
    }
    killed = Engine(model, log, cache)
    assert said(killed.generate(*WRITTEN)) == expected[: len(WRITTEN)]
    assert idle(killed)  # all of it is on disk
    killed.ask("die_writing", 5)
    with pytest.raises(AssertionError, match="exit code -9"):
        serve(killed)
    killed.kill()

    whole = [len(request.tokens) // 128 * 128 for request in (*WRITTEN, *CUT_OFF)]
    with Engine(model, log, cache) as engine:
        first = engine.generate(*WRITTEN, *CUT_OFF)
        assert said(first) == expected
        found = [answer.cached for answer in first]
        assert found[: len(WRITTEN)] == whole[: len(WRITTEN)]
        assert sum(found) < sum(whole)
        assert engine.ask("stats")["tiers"]["disk"].get("rejected", 0) == 0
        again = engine.generate(*WRITTEN, *CUT_OFF)
        assert said(again) == expected
        assert [answer.cached for answer in again] == whole
        assert idle(engine)
