"""CachedGenerator and a model that isn't what it was: other weights, adapters, dtypes, caches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from tiny_models import greedy, llama, prompt, tiers

from lmcache_core.connectors.transformers import CachedGenerator
from lmcache_core.connectors.transformers.workspace import RoomyLayer
from lmcache_core.errors import LMCacheError, UnsupportedModel
from lmcache_core.events import Event, Retrieved

NEW = 12


def answers(generator: CachedGenerator, tokens: list[int], **options: Any) -> list[tuple[int, ...]]:
    return [one.tokens for one in generator.generate(tokens, max_new_tokens=NEW, **options)]


def test_changed_weights_are_computed_afresh_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    tokens = prompt(130)
    with CachedGenerator(model, tiers()) as generator:
        before = answers(generator, tokens)
        model.model.layers[0].self_attn.k_proj.weight.data += 0.3  # as merging an adapter does
        expected = greedy(model, tokens, NEW)
        assert [expected] != before
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                [result] = generator.generate(tokens, max_new_tokens=NEW)
                assert result.tokens == expected
                assert result.prompt.num_loaded_tokens == 0
        assert sum("changed since the cache was attached" in record.message for record in caplog.records) == 1


def test_a_model_of_another_dtype_by_now_is_refused_with_the_reason() -> None:
    model = llama()
    with CachedGenerator(model, tiers()) as generator:
        model.to(torch.bfloat16)
        with pytest.raises(LMCacheError, match=r"became torch\.bfloat16 on cpu.*make a new"):
            generator.generate(prompt(80), max_new_tokens=2)


@pytest.fixture
def takes_kv_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on, models keep their KV elsewhere than in the cache they get, once it has more tokens."""

    def from_tokens(most: int) -> None:
        update = RoomyLayer.update

        def moving(self: RoomyLayer, *states: torch.Tensor, **options: Any) -> Any:
            keys, values = update(self, *states, **options)
            if keys.shape[2] > most:
                self.keys, self.values = keys.clone(), values.clone()
            return keys, values

        monkeypatch.setattr(RoomyLayer, "update", moving)

    return from_tokens


@pytest.mark.parametrize("config", [None, t.GenerationConfig(max_new_tokens=NEW)])  # type: ignore[no-untyped-call]
def test_kv_that_leaves_the_cache_in_a_prompt_is_refused_and_never_stored(
    takes_kv_away: Callable[[int], None], config: t.GenerationConfig | None
) -> None:
    tokens = prompt(130)
    with CachedGenerator(llama(), tiers()) as generator:
        takes_kv_away(100)
        with pytest.raises(UnsupportedModel, match=r"after 1(30|29) tokens this model's KV isn't in"):
            generator.generate(tokens, max_new_tokens=NEW, generation_config=config)
        assert generator.engine.lookup(tokens).num_tokens == 0


@pytest.mark.parametrize("config", [None, t.GenerationConfig(max_new_tokens=NEW)])  # type: ignore[no-untyped-call]
def test_kv_that_leaves_the_cache_in_an_answer_is_not_stored(
    takes_kv_away: Callable[[int], None], config: t.GenerationConfig | None
) -> None:
    model, tokens = llama(), prompt(134)
    with CachedGenerator(model, tiers()) as generator:
        takes_kv_away(136)
        [answer] = answers(generator, tokens, generation_config=config)
        assert answer == greedy(model, tokens, NEW)
        held = generator.engine.lookup([*tokens, *answer]).num_tokens
    assert held == (128 if config is None else 0)  # sampling stores a prompt with its answer


def test_weights_that_change_while_a_request_runs_leave_nothing_behind(tmp_path: Path) -> None:
    tokens = prompt(130)
    model = llama()

    class TrainingStep:
        def on_event(self, event: Event) -> None:
            model.model.layers[0].self_attn.k_proj.weight.data += 0.3

    with CachedGenerator(model, tiers(tmp_path)) as generator:
        stop = generator.engine.subscribe(TrainingStep(), Retrieved)  # before the prompt is computed
        generator.generate(tokens, max_new_tokens=NEW)
        stop()
        assert generator.flush(30)
    model = llama()
    with CachedGenerator(model, tiers(tmp_path)) as generator:
        [result] = generator.generate(tokens, max_new_tokens=NEW)
        assert (result.tokens, result.prompt.num_loaded_tokens) == (greedy(model, tokens, NEW), 0)


def test_a_store_of_other_weights_is_never_loaded(tmp_path: Path) -> None:
    tokens = prompt(130)
    for seed in (0, 1, 0):
        model = llama(seed=seed)
        with CachedGenerator(model, tiers(tmp_path)) as generator:
            [result] = generator.generate(tokens, max_new_tokens=NEW)
            assert result.tokens == greedy(model, tokens, NEW)
            assert generator.flush(30)
    assert result.prompt.tokens_by_tier == {"disk": 128}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_each_adapter_sees_its_own_kv_and_the_base_model_its_own() -> None:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "init_lora_weights": False,
    }
    torch.manual_seed(1)
    model = get_peft_model(llama(), LoraConfig(**options), adapter_name="first")
    model.add_adapter("second", LoraConfig(**options))
    model.eval()
    tokens = prompt(130)
    base = model.get_base_model()
    with CachedGenerator(model, tiers()) as generator:
        for round_number in range(2):
            seen = set()
            for adapter in ("first", "second", None):
                if adapter is None:
                    with model.disable_adapter():
                        expected = greedy(base, tokens, NEW)
                        [result] = generator.generate(tokens, max_new_tokens=NEW)
                else:
                    model.set_adapter(adapter)
                    expected = greedy(base, tokens, NEW)
                    [result] = generator.generate(tokens, max_new_tokens=NEW)
                assert result.tokens == expected
                assert result.prompt.num_loaded_tokens == (128 if round_number else 0)
                seen.add(result.tokens)
            assert len(seen) == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_switched_while_a_request_runs_leaves_nothing_behind() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    model.eval()
    tokens = prompt(130)

    class Switch:
        def on_event(self, event: Event) -> None:
            model.set_adapter("second")

    with CachedGenerator(model, tiers()) as generator:
        stop = generator.engine.subscribe(Switch(), Retrieved)  # before the prompt is computed
        generator.generate(tokens, max_new_tokens=NEW)
        stop()
        model.set_adapter("first")
        [result] = generator.generate(tokens, max_new_tokens=NEW)
        assert result.tokens == greedy(model.get_base_model(), tokens, NEW)
        assert result.prompt.num_loaded_tokens == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_disabling_a_merged_adapter_never_meets_the_merged_kv() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(llama(), config).eval()
    model.merge_adapter()
    tokens = prompt(130)
    with CachedGenerator(model, tiers()) as generator:
        merged = answers(generator, tokens)
        with model.disable_adapter():  # the next forward takes it out of the weights
            [result] = generator.generate(tokens, max_new_tokens=NEW)
            assert [result.tokens] == [greedy(model.get_base_model(), tokens, NEW)] != merged
            assert result.prompt.num_loaded_tokens == 0
