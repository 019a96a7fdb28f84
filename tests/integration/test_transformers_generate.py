"""CachedGenerator over real tiers: the tokens of a run without any cache, from less computing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from tiny_models import SIZES, gpt2, greedy, llama, made, prompt, tiers

from lmcache_core.connectors.transformers import CachedGenerator
from lmcache_core.errors import ConfigError, LMCacheError, UnsupportedModel

NEW = 12


def answers(generator: CachedGenerator, tokens: Any, **options: Any) -> list[tuple[int, ...]]:
    return [one.tokens for one in generator.generate(tokens, max_new_tokens=NEW, **options)]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture
def generator(model: Any) -> Iterator[CachedGenerator]:
    with CachedGenerator(model, tiers()) as made_for_it:
        yield made_for_it
        assert made_for_it.engine.stats().memory.leases == 0
        assert made_for_it.engine.stats().memory.lost_leases == 0


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(llama, id="llama"),
        pytest.param(gpt2, id="absolute positions"),
        pytest.param(lambda: made(t.Qwen2Config(**SIZES)), id="qwen2"),
        pytest.param(
            lambda: made(
                t.BloomConfig(
                    vocab_size=128,
                    hidden_size=64,
                    n_layer=2,
                    n_head=4,
                    initializer_range=0.2,
                    eos_token_id=None,
                )
            ),
            id="alibi",
        ),
        pytest.param(
            lambda: llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), id="yarn"
        ),
    ],
)
def test_answers_are_those_of_a_run_without_a_cache(build: Any) -> None:
    model = build()
    shared = prompt(300, seed=1)
    prompts = [shared + prompt(40, seed=2), shared + prompt(90, seed=3)]
    expected = [greedy(model, tokens, NEW) for tokens in prompts]
    with CachedGenerator(model, tiers()) as generator:
        for tokens, want in zip(prompts, expected, strict=True):
            assert answers(generator, tokens) == [want]
        for tokens, want in zip(prompts, expected, strict=True):
            [again] = generator.generate(tokens, max_new_tokens=NEW)
            assert again.tokens == want
            assert again.prompt.num_loaded_tokens == len(tokens) // 16 * 16


def test_the_end_of_a_prompt_is_loaded_in_steps_of_sixteen(generator: CachedGenerator) -> None:
    tokens = prompt(64 * 3 + 39)
    first = generator.generate(tokens, max_new_tokens=1)[0].prompt
    second = generator.generate(tokens, max_new_tokens=1)[0].prompt
    assert (first.num_loaded_tokens, first.num_computed_tokens) == (0, len(tokens))
    assert (second.num_loaded_tokens, second.num_computed_tokens) == (64 * 3 + 32, 7)
    assert second.tokens_by_tier == {"memory": 64 * 3 + 32}


def test_a_prompt_that_is_known_to_its_end_computes_its_last_token(
    model: Any, generator: CachedGenerator
) -> None:
    tokens = prompt(128)
    want = greedy(model, tokens, NEW)
    for _ in range(2):
        [result] = generator.generate(tokens, max_new_tokens=NEW)
        assert result.tokens == want
    assert (result.prompt.num_loaded_tokens, result.prompt.num_computed_tokens) == (127, 1)
    assert sum(result.prompt.tokens_by_tier.values()) == 127


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 64, 65])
def test_short_prompts_around_every_boundary_are_answered_alike(
    model: Any, generator: CachedGenerator, count: int
) -> None:
    tokens = prompt(count, seed=count)
    want = [greedy(model, tokens, NEW)]
    assert [answers(generator, tokens) for _ in range(3)] == [want] * 3


def test_bf16_kv_comes_back_bit_for_bit() -> None:
    model = llama(dtype=torch.bfloat16)
    tokens = prompt(200)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        computed = model(ids, use_cache=True).cache
    with CachedGenerator(model, tiers()) as generator:
        generator.prefill(tokens)
        content = generator.engine.content(tokens)
        with generator._workspace.batch([len(tokens)], 0) as batch:
            for keys, values in batch.planes:
                keys.fill_(-1)
                values.fill_(-1)
            assert generator.engine.retrieve(content, batch.row(0)).num_tokens == 192
            for (keys, values), layer in zip(batch.planes, computed.layers, strict=True):
                assert torch.equal(keys[:, :, :192], layer.keys[:, :, :192])
                assert torch.equal(values[:, :, :192], layer.values[:, :, :192])
        assert answers(generator, tokens) == answers(generator, tokens)


# -- batches -------------------------------------------------------------------------------------------


def test_rows_of_very_different_lengths_equal_their_own_batch_of_one(
    model: Any, generator: CachedGenerator
) -> None:
    rows = [prompt(300, seed=1), prompt(1500, seed=2), prompt(4000, seed=3)]
    expected = [greedy(model, row, NEW) for row in rows]
    generator.generate(rows[0][:200], max_new_tokens=1)
    generator.generate(rows[2], max_new_tokens=1)
    results = generator.generate(rows, max_new_tokens=NEW)
    assert [result.tokens for result in results] == expected
    assert [result.prompt.num_loaded_tokens for result in results] == [192, 0, 3999]
    results = generator.generate(rows, max_new_tokens=NEW)
    assert [result.tokens for result in results] == expected
    assert [result.prompt.num_loaded_tokens for result in results] == [288, 1488, 3999]
    assert [answers(generator, row)[0] for row in rows] == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_tensors_are_known_by_their_own_tokens(
    model: Any, generator: CachedGenerator, side: str
) -> None:
    rows = [prompt(70, seed=1), prompt(200, seed=2)]
    expected = [greedy(model, row, NEW) for row in rows]
    for row in rows:
        generator.generate(row, max_new_tokens=1)
    ids, mask = torch.full((2, 200), 7), torch.zeros(2, 200, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(200 - len(row), 200) if side == "left" else slice(0, len(row))
        ids[index, place] = torch.tensor(row)
        mask[index, place] = 1
    results = generator.generate(ids, mask, max_new_tokens=NEW)
    assert [result.tokens for result in results] == expected
    assert [result.prompt.num_loaded_tokens for result in results] == [64, 192]


def test_a_row_loads_what_a_row_before_it_computed(generator: CachedGenerator) -> None:
    shared = prompt(256, seed=4)
    rows = [shared + prompt(30, seed=5), shared + prompt(50, seed=6)]
    first, second = generator.generate(rows, max_new_tokens=1)
    assert first.prompt.num_loaded_tokens == 0
    assert second.prompt.num_loaded_tokens == 256


def test_a_row_that_ends_early_leaves_the_others_to_go_on(model: Any, generator: CachedGenerator) -> None:
    rows = [prompt(40, seed=1), prompt(90, seed=2)]
    expected = [greedy(model, row, NEW) for row in rows]
    end = next(token for token in expected[0] if token not in expected[1])
    stop = expected[0].index(end) + 1
    assert answers(generator, rows, eos_token_id=end) == [expected[0][:stop], expected[1]]


# -- what generate takes and refuses -------------------------------------------------------------------


def test_an_end_token_is_one_in_every_kind_of_integer(model: Any, generator: CachedGenerator) -> None:
    tokens = prompt(80)
    want = greedy(model, tokens, NEW)
    end = want[1]
    ended = want[: want.index(end) + 1]
    kinds: list[Any] = [
        end,
        np.int64(end),
        [end],
        (127 - end, end),
        np.array([end]),
        torch.tensor([end, end]),
    ]
    for kind in kinds:
        assert answers(generator, tokens, eos_token_id=kind) == [ended]
    for wrong in ("</s>", 1.5, ["</s>"]):
        with pytest.raises(TypeError):
            answers(generator, tokens, eos_token_id=wrong)


def test_an_answer_is_part_of_the_next_turns_prefix(generator: CachedGenerator) -> None:
    tokens = prompt(100)
    [first] = generator.generate(tokens, max_new_tokens=40)
    turn = [*tokens, *first.tokens, *prompt(20, seed=9)]
    [second] = generator.generate(turn, max_new_tokens=1)
    assert second.prompt.num_loaded_tokens == (100 + 39) // 16 * 16


@pytest.mark.parametrize("config", [None, t.GenerationConfig(max_new_tokens=NEW)])  # type: ignore[no-untyped-call]
def test_the_last_token_of_an_answer_has_no_kv_and_none_is_stored(
    model: Any, generator: CachedGenerator, config: t.GenerationConfig | None
) -> None:
    tokens = prompt(96 - NEW)
    [answer] = answers(generator, tokens, generation_config=config)
    turn = [*tokens, *answer, *prompt(5, seed=9)]  # 96 tokens could be a tail, were all of them computed
    [result] = generator.generate(turn, max_new_tokens=NEW)
    assert result.tokens == greedy(model, turn, NEW)
    assert result.prompt.num_loaded_tokens == 80


def test_sampling_goes_on_from_the_loaded_prefix(model: Any, generator: CachedGenerator) -> None:
    rows = [prompt(150, seed=1), prompt(260, seed=2)]
    generator.generate(rows, max_new_tokens=1)
    plain = t.GenerationConfig(do_sample=False, max_new_tokens=NEW)
    results = generator.generate(rows, generation_config=plain)
    assert [result.tokens for result in results] == [greedy(model, row, NEW) for row in rows]
    assert [result.prompt.num_loaded_tokens for result in results] == [144, 256]
    assert all(result.first_token_s > 0 for result in results)

    sampling = t.GenerationConfig(do_sample=True, top_k=5, temperature=2.0, max_new_tokens=NEW)
    torch.manual_seed(7)
    [sampled] = generator.generate(rows[0], generation_config=sampling)
    torch.manual_seed(7)
    ids = torch.tensor([rows[0]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=sampling)
    assert sampled.tokens == tuple(output[0, len(rows[0]) :].tolist())


def test_a_model_whose_default_is_to_use_no_cache_samples_correctly() -> None:
    config = t.MptConfig(
        vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=512, initializer_range=0.2
    )
    model = made(config)
    assert model.generation_config.use_cache is False
    tokens = prompt(90)
    with CachedGenerator(model, tiers()) as generator:
        generator.generate(tokens, max_new_tokens=1)
        [result] = generator.generate(
            tokens, generation_config=t.GenerationConfig(do_sample=False, max_new_tokens=NEW)
        )
    assert result.prompt.num_loaded_tokens == 80
    assert result.tokens == greedy(model, tokens, NEW)


def test_odd_requests_are_refused_before_anything_is_computed(generator: CachedGenerator) -> None:
    beams = t.GenerationConfig(num_beams=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="beams"):
        generator.generate([3, 4], generation_config=beams)
    with pytest.raises(ValueError, match="prompt 1 has no token"):
        generator.generate([[3], []])
    with pytest.raises(ValueError, match="no token"):
        generator.generate([])
    with pytest.raises(ValueError, match="at least 1"):
        generator.generate([3], max_new_tokens=0)
    with pytest.raises(ValueError, match="lists hold no padding"):
        generator.generate([3], torch.ones(1, 1))
    ids = torch.ones(2, 3, dtype=torch.long)
    for shape in ((3, 2), (6,), (2, 4)):
        with pytest.raises(ValueError, match="an attention_mask of"):
            generator.generate(ids, torch.ones(shape, dtype=torch.long))
    for mask in (torch.zeros(2, 3).sub(1e9), torch.tensor([[1, 1, 2]] * 2)):
        with pytest.raises(ValueError, match="nothing else"):
            generator.generate(ids, mask)
    with pytest.raises(ValueError, match=r"\[1, 1, 1\]"):
        generator.generate(torch.ones(1, 1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="one prompt, not 2"):
        generator.prefill(torch.ones(2, 5, dtype=torch.long))


@pytest.mark.parametrize("where", ["request", "model"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("num_beams", 3), ("num_return_sequences", 2), ("cache_implementation", "static")),
        *(("prompt_lookup_num_tokens", 3), ("assistant_early_exit", 1)),
    ],
)
def test_an_option_that_is_not_offered_is_refused_wherever_it_stands(
    where: str, option: str, value: object
) -> None:
    model = llama()
    config = t.GenerationConfig(max_new_tokens=4)
    setattr(config if where == "request" else model.generation_config, option, value)
    with CachedGenerator(model, tiers()) as generator, pytest.raises(ValueError, match="not offered"):
        generator.generate([3, 4, 5], generation_config=config)


def test_a_total_length_is_refused_and_a_dictionary_of_results_is_not_asked_for(
    model: Any, generator: CachedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="max_new_tokens in place of max_length"):
        generator.generate([3, 4, 5], generation_config=t.GenerationConfig(max_length=21))
    monkeypatch.setattr(model.generation_config, "max_length", 20)  # as in many a model's file
    derived = copy.deepcopy(model.generation_config)
    assert len(answers(generator, [3, 4, 5], generation_config=derived)[0]) == NEW
    config = t.GenerationConfig(max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True)
    tokens = prompt(80)
    assert answers(generator, tokens, generation_config=config) == [greedy(model, tokens, NEW)]


def test_no_id_is_rounded_or_cut_to_another_tokens(generator: CachedGenerator) -> None:
    known = prompt(80)
    answers(generator, known)
    for wrong in (2**32, -(2**32), -128):
        with pytest.raises(ValueError, match="token ids must be"):
            answers(generator, [*known[:3], known[3] + wrong, *known[4:]])
    for floats in ([3.5], [[3.5]], torch.ones(1, 5), np.ones(5)):
        with pytest.raises(TypeError, match="must be integers"):
            answers(generator, floats)


def test_a_prompt_is_the_same_in_every_kind_of_array(generator: CachedGenerator) -> None:
    tokens = prompt(80)
    want = answers(generator, tokens)
    array = np.array(tokens)
    for alike in (array, array.astype(np.int32), list(array), [array], array[None], torch.from_numpy(array)):
        [result] = generator.generate(alike, max_new_tokens=NEW)
        assert ([result.tokens], result.prompt.num_loaded_tokens) == (want, 79)


def test_without_store_nothing_is_kept(generator: CachedGenerator) -> None:
    tokens = prompt(130)
    for _ in range(2):
        assert generator.generate(tokens, max_new_tokens=4, store=False)[0].prompt.num_loaded_tokens == 0


def test_prefill_makes_a_documents_end_known(generator: CachedGenerator) -> None:
    document = prompt(250, seed=1)
    assert generator.prefill(document).num_computed_tokens == 250
    again = generator.prefill(document)
    assert (again.num_loaded_tokens, again.num_computed_tokens) == (0, 0)
    [result] = generator.generate(document + prompt(60, seed=2), max_new_tokens=1)
    assert result.prompt.num_loaded_tokens == 240


def test_a_salt_hides_a_prefix_from_everyone_without_it(generator: CachedGenerator) -> None:
    tokens = prompt(130)
    generator.generate(tokens, max_new_tokens=1, salt=b"tenant a")
    loaded = {
        salt: generator.generate(tokens, max_new_tokens=1, salt=salt, store=False)[0].prompt.num_loaded_tokens
        for salt in (b"", b"tenant a", b"tenant b")
    }
    assert loaded == {b"": 0, b"tenant a": 128, b"tenant b": 0}


# -- life ----------------------------------------------------------------------------------------------


def test_a_refused_model_opens_no_tier(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        CachedGenerator(made(t.MistralConfig(**SIZES, sliding_window=64)), tiers(folder))
    assert not folder.exists()


def test_a_config_error_names_the_key(model: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        CachedGenerator(model, {**tiers(), "chunk_token": 64})


def test_a_given_engine_stays_open_and_must_be_the_models_own(model: Any) -> None:
    tokens = prompt(130)
    with CachedGenerator(model, tiers()) as owner:
        with CachedGenerator(model, owner.engine) as second:
            second.generate(tokens, max_new_tokens=1)
        assert owner.generate(tokens, max_new_tokens=1)[0].prompt.num_loaded_tokens == 128
        with pytest.raises(LMCacheError, match="another model"):
            CachedGenerator(llama(seed=5), owner.engine)


def test_threads_share_a_generator(model: Any, generator: CachedGenerator) -> None:
    shared = prompt(300, seed=1)
    prompts = [shared + prompt(20 + 30 * number, seed=10 + number) for number in range(4)]
    expected = [[greedy(model, tokens, NEW)] for tokens in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda tokens: answers(generator, tokens), prompts)) == expected


def test_a_closed_generator_says_so(model: Any) -> None:
    generator = CachedGenerator(model, tiers())
    generator.close()
    generator.close()
    with pytest.raises(LMCacheError, match="closed"):
        generator.generate([3, 4, 5])
