"""Masks of tokens, whatever they are made of."""

from __future__ import annotations

import pytest
import torch

from lmcache_core.engine.masks import skipped_tokens


def view(values: bytes) -> memoryview[bool]:
    return memoryview(values).cast("?")


@pytest.mark.parametrize("skipped", [0, 32, 64, 100])
def test_lists_tensors_and_views_of_one_mask_say_the_same(skipped: int) -> None:
    flags = [False] * skipped + [True] * (100 - skipped)
    masks = [flags, torch.tensor(flags), view(bytes(flags)), view(bytes(7 * flag for flag in flags))]
    answers = []
    for mask in masks:
        try:
            answers.append(str(skipped_tokens(mask, 100, 32)))
        except ValueError as error:
            answers.append(str(error))
    assert len(set(answers)) == 1
    assert (answers[0] == str(skipped)) == (skipped % 32 == 0)


def test_a_view_with_a_hole_is_refused_as_a_list_is() -> None:
    flags = [False] * 32 + [True, False] + [True] * 30
    for mask in (flags, view(bytes(flags)), view(bytes(3 * flag for flag in flags))):
        with pytest.raises(ValueError, match="False up to some token"):
            skipped_tokens(mask, 64, 32)
