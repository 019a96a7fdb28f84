"""Content known by its hashes alone is the content it was taken from, as far as it goes."""

from __future__ import annotations

import pickle

import pytest

from lmcache_core.identity import Content, ModelRecord, NamedContent, Part

MODEL = ModelRecord(weights="w", config={}, chunk_tokens=64)
PART = Part(layers=(0, 1), heads=(0, 1), content_format="test", content_nbytes=1)


def content(num_tokens: int = 200) -> Content:
    made = Content(MODEL, salt=b"secret")
    made.extend(list(range(num_tokens)))
    return made


@pytest.mark.parametrize("num_tokens", [0, 64, 128, 80, 192])
def test_the_names_of_a_prefix_are_those_of_the_content(num_tokens: int) -> None:
    whole, prefix = content(), content(num_tokens)
    named = NamedContent.of(whole, num_tokens)
    assert named.num_tokens == num_tokens
    assert named.keys(PART) == prefix.keys(PART)
    assert named.tails(PART) == prefix.tails(PART)[:1]
    assert named.tails_after(PART, 0) == ([] if num_tokens >= 64 else prefix.tails_after(PART, 0)[:1])


@pytest.mark.parametrize("num_tokens", [70, 256, 208])
def test_a_prefix_that_has_no_name_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"ends at {num_tokens}"):
        NamedContent.of(content(), num_tokens)


def test_names_travel_between_processes_without_salt_or_tokens() -> None:
    named = NamedContent.of(content(), 80)
    stored = pickle.dumps(named)
    assert b"secret" not in stored
    again = pickle.loads(stored)
    assert (again.keys(PART), again.tails(PART)) == (named.keys(PART), named.tails(PART))
    assert again.model == MODEL


def test_names_do_not_grow() -> None:
    named = NamedContent.of(content(), 64)
    with pytest.raises(TypeError, match="does not grow"):
        named.extend([1])
    with pytest.raises(TypeError, match="no tokens"):
        _ = named.tokens
