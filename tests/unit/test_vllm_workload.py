"""The benchmark's workloads: the same for a seed, and as much shared as they say."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks/vllm/workload.py"


@pytest.fixture(scope="module")
def workload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_benchmark_workload", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape(workload: ModuleType, **changes: int) -> object:
    return workload.Shape(**{"document": 64, "question": 8, "answer": 4, "documents": 3} | changes)


@pytest.mark.parametrize("kind", ["document-qa", "multi-round", "random"])
def test_a_seed_gives_the_same_prompts_in_every_process(workload: ModuleType, kind: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from workload import *; "
        f"print([list(p.tokens) for p in KINDS[{kind!r}](Shape(64, 8, 4, 3), 5, 7)])"
    )
    here = [list(prompt.tokens) for prompt in workload.KINDS[kind](shape(workload), 5, 7)]
    there = subprocess.run(
        [sys.executable, "-c", code, FILE.parent], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str(here)


@pytest.mark.parametrize("kind", ["document-qa", "multi-round", "random"])
def test_another_seed_asks_something_else(workload: ModuleType, kind: str) -> None:
    one, other = (
        {tuple(prompt.tokens) for prompt in workload.KINDS[kind](shape(workload), 6, seed)} for seed in (1, 2)
    )
    assert len(one) == 6
    assert one.isdisjoint(other)


def test_questions_about_one_document_share_exactly_the_document(workload: ModuleType) -> None:
    first, *_, again = workload.document_qa(shape(workload), 4, 0)
    assert len(first.tokens) == 64 + 8
    assert shared(first.tokens, again.tokens) == 64


def test_different_documents_share_nothing_that_a_chunk_could_hold(workload: ModuleType) -> None:
    prompts = workload.document_qa(shape(workload), 3, 0)
    assert (
        max(shared(one.tokens, other.tokens) for one in prompts for other in prompts if one is not other) < 8
    )


def test_documents_are_the_same_whatever_is_asked(workload: ModuleType) -> None:
    filled, asked = (workload.document_qa(shape(workload), 3, seed) for seed in (-1, 5))
    assert [shared(one.tokens, other.tokens) for one, other in zip(filled, asked, strict=True)] == [64] * 3


def test_each_round_of_a_chat_begins_with_every_round_before(workload: ModuleType) -> None:
    chat = workload.multi_round(shape(workload, documents=1), 4, 0)
    for before, after in pairwise(chat):
        assert list(after.tokens[: len(before.tokens)]) == list(before.tokens)
        assert len(after.tokens) == len(before.tokens) + 4 + 8


def test_random_prompts_share_nothing_that_a_chunk_could_hold(workload: ModuleType) -> None:
    prompts = workload.random_prompts(shape(workload), 5, 0)
    assert (
        max(shared(one.tokens, other.tokens) for one in prompts for other in prompts if one is not other) < 8
    )


def test_tokens_are_words_of_the_vocabulary(workload: ModuleType) -> None:
    small = shape(workload, vocabulary=16)
    seen = {
        token for kind in workload.KINDS.values() for prompt in kind(small, 9, 0) for token in prompt.tokens
    }
    assert seen == set(range(workload.FIRST_TOKEN, 16))


def test_arrivals_are_a_poisson_process_of_the_rate(workload: ModuleType) -> None:
    times = workload.arrivals(4.0, 4001, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0.0
    # Of an exponential, mean and deviation are equal; both are known to 1.6 % (one sigma) after 4,000.
    assert statistics.mean(gaps) == pytest.approx(1 / 4.0, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4.0, rel=0.08)


def test_arrivals_are_the_same_for_a_seed_and_others_for_another(workload: ModuleType) -> None:
    assert workload.arrivals(1.0, 9, 1) == workload.arrivals(1.0, 9, 1) != workload.arrivals(1.0, 9, 2)


def shared(one: list[int], other: list[int]) -> int:
    """How many leading tokens are equal."""
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
