"""Requests given as bare tokens: what is remembered, and what is refused all the same."""

from __future__ import annotations

from array import array

import pytest

from lmcache_core.engine.recent import REMEMBERED_REQUESTS, RecentContents
from lmcache_core.identity import ModelRecord

TOKENS = list(range(100, 164))


@pytest.fixture
def recent() -> RecentContents:
    return RecentContents(ModelRecord(weights="00", config={}, chunk_tokens=16))


def test_the_same_tokens_in_any_form_are_hashed_once(recent: RecentContents) -> None:
    content = recent.of(TOKENS)
    assert content.num_chunks == 4
    for tokens in (TOKENS, tuple(TOKENS), array("i", TOKENS), array("q", TOKENS)):
        assert recent.of(tokens) is content


def test_other_tokens_are_another_content_and_push_the_oldest_out(recent: RecentContents) -> None:
    first = recent.of(TOKENS)
    others = [recent.of([*TOKENS, extra]) for extra in range(REMEMBERED_REQUESTS)]
    assert first not in others
    assert recent.of([*TOKENS, REMEMBERED_REQUESTS - 1]) is others[-1]
    assert recent.of(TOKENS) is not first


@pytest.mark.parametrize("token", [-1, 2**31])
def test_an_id_that_is_none_is_refused_and_never_remembered(recent: RecentContents, token: int) -> None:
    for tokens in ([*TOKENS, token], array("q", [*TOKENS, token])):
        for _ in range(2):
            with pytest.raises(ValueError, match="token ids must be from 0 to 2147483647"):
                recent.of(tokens)
    assert recent.of(TOKENS).num_tokens == len(TOKENS)
