"""One call of generate: what each row needed, and the steps a call is made of."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from lmcache_core.connectors.transformers.forward import Forward, cache_of
from lmcache_core.connectors.transformers.workspace import Batch, RoomyLayer, RowKV
from lmcache_core.engine import CacheEngine
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import TAIL_UNIT, Content


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """Where the KV of one prompt came from. Loaded and computed tokens sum to the prompt's."""

    num_tokens: int
    num_loaded_tokens: int
    num_computed_tokens: int
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    """Loaded tokens by tier name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one prompt gave: the new tokens (an end-of-sequence token included)."""

    tokens: tuple[int, ...]
    prompt: PromptReport
    first_token_s: float
    """Seconds from the call to this row's first token."""


class Run:
    """One call of `generate` or `prefill`. For one thread; runs in inference mode."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Forward,
        engine: CacheEngine,
        rows: Sequence[Tensor],
        contents: Sequence[Content | None],
        *,
        store: bool,
        unchanged: Callable[[], bool],
        started: float,
    ) -> None:
        """`unchanged` says whether the model is still the one that `contents` were named for."""
        self._model: Any = model
        self._forward = forward
        self._engine = engine
        self._rows = rows
        self.contents = contents
        self._store = store
        self._unchanged = unchanged
        self._started = started

    def fill(self, batch: Batch, row: int, num_tokens: int) -> tuple[PromptReport, Tensor | None]:
        """Brings the KV of the row's first `num_tokens` tokens into `batch`, loaded or computed.

        Returns the last of these tokens' logits `[1, vocabulary]`, None where there was none to compute.
        """
        tokens, content, kv = self._rows[row], self.contents[row], batch.row(row)
        loaded, by_tier = 0, dict[str, int]()
        if content is not None:
            hit = self._engine.retrieve(content, kv)
            loaded, by_tier = hit.num_tokens, dict(hit.tokens_by_tier)
            if loaded == len(tokens):  # the last token is computed all the same: its logits are not stored
                loaded -= 1
                by_tier = dict(Counter(by_tier) - Counter([list(by_tier)[-1]]))
        logits = None
        if loaded < num_tokens:
            layers = batch.row_layers(row, loaded)
            positions = torch.arange(loaded, num_tokens).unsqueeze(0)
            new = tokens[loaded:num_tokens].unsqueeze(0)
            logits = self._forward(new, cache_of(self._model, layers), positions)
            if not _filled(layers, num_tokens):
                raise UnsupportedModel(
                    f"after {num_tokens} tokens this model's KV isn't in the cache it was given: it drops or "
                    "rewrites some"
                )
        # With fewer tokens computed nothing is new, and storing only says that what was loaded is in use.
        if num_tokens == len(tokens) and (num_tokens - loaded < TAIL_UNIT or self._unchanged()):
            self._keep(content, kv)
        report = PromptReport(
            num_tokens=len(tokens),
            num_loaded_tokens=loaded,
            num_computed_tokens=len(tokens) - loaded,
            tokens_by_tier=by_tier,
        )
        return report, logits

    def greedy(self, batch: Batch, max_new_tokens: int, eos: frozenset[int]) -> list[Generation]:
        prompts, answers, seconds = [], [], []
        for row, tokens in enumerate(self._rows):
            report, logits = self.fill(batch, row, len(tokens))
            assert logits is not None
            answers.append([int(logits.argmax())])
            seconds.append(time.perf_counter() - self._started)
            prompts.append(report)
        filled = self._decode(batch, answers, max_new_tokens, eos)
        return self._results(batch, answers, prompts, seconds, filled=filled)

    def sample(self, batch: Batch, config: GenerationConfig) -> list[Generation]:
        """Leaves each row's last prompt token, and all that follow, to the model's own `generate`."""
        prompts = [self.fill(batch, row, len(tokens) - 1)[0] for row, tokens in enumerate(self._rows)]
        layers = batch.layers(batch.length - 1)
        ids = torch.full((len(self._rows), batch.length), _pad_token(self._model.generation_config, config))
        for row, tokens in enumerate(self._rows):
            ids[row, batch.padding[row] :] = tokens
        cache = cache_of(self._model, layers)
        first = _FirstStep(cache, batch.length)
        output = self._model.generate(
            ids,
            attention_mask=batch.mask(batch.length),
            generation_config=config,
            logits_processor=LogitsProcessorList([first]),
            **{self._forward.cache_argument: cache},
        )
        eos = config.eos_token_id
        ends = ids_of(self._model.generation_config.eos_token_id if eos is None else eos)
        answers = [_until(row.tolist(), ends) for row in output[:, batch.length :]]
        seconds = [first.at - self._started] * len(self._rows)
        filled = _filled(layers, output.shape[1] - 1)
        return self._results(batch, answers, prompts, seconds, filled=filled)

    def _decode(
        self, batch: Batch, answers: list[list[int]], max_new_tokens: int, eos: frozenset[int]
    ) -> bool:
        """Appends tokens to each answer until it has ended or is long enough, all rows in one forward.

        Returns whether the KV of all tokens but the last is in `batch`.
        """
        layers = batch.layers(batch.length)
        cache = cache_of(self._model, layers)
        mask = batch.mask(batch.length + max_new_tokens) if any(batch.padding) else None
        positions = torch.tensor([[len(tokens)] for tokens in self._rows])
        tokens = torch.tensor(answers)
        for step in range(1, max_new_tokens):
            running = [answer for answer in answers if answer[-1] not in eos]
            if not running:
                break
            seen = None if mask is None else mask[:, : batch.length + step]
            tokens = self._forward(tokens, cache, positions, seen).argmax(-1, keepdim=True)
            positions = positions + 1
            for answer, token in zip(answers, tokens[:, 0].tolist(), strict=True):
                if answer[-1] not in eos:
                    answer.append(token)
        return _filled(layers, batch.length + max(map(len, answers)) - 1)

    def _results(
        self,
        batch: Batch,
        answers: Sequence[Sequence[int]],
        prompts: Sequence[PromptReport],
        seconds: Sequence[float],
        *,
        filled: bool,
    ) -> list[Generation]:
        """Stores the answers too, for chats that go on: all but the last token, whose KV nobody computed."""
        keep = self._store and filled and self._unchanged()
        for row, answer in enumerate(answers):
            content = self.contents[row]
            if content is not None and keep:
                content.extend(answer[:-1])
                self._keep(content, batch.row(row))
        return [
            Generation(tokens=tuple(answer), prompt=prompt, first_token_s=first)
            for answer, prompt, first in zip(answers, prompts, seconds, strict=True)
        ]

    def _keep(self, content: Content | None, kv: RowKV) -> None:
        if content is not None and self._store:
            self._engine.store(content, kv)


class _FirstStep(LogitsProcessor):
    """Changes no score; notes when the first ones were there, and that they rest on the right KV."""

    def __init__(self, cache: DynamicCache, num_slots: int) -> None:
        self.at = 0.0
        self._cache = cache
        self._num_slots = num_slots

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.at:
            self.at = time.perf_counter()
            if (length := self._cache.get_seq_length()) != self._num_slots:
                raise UnsupportedModel(
                    f"this model's generate() doesn't go on from a filled cache: {length} tokens in place of "
                    f"{self._num_slots}; only greedy decoding (no generation_config) is offered for it"
                )
        return scores


def _filled(layers: Sequence[RoomyLayer], num_slots: int) -> bool:
    """Whether the KV of exactly these slots lies in the batch's memory, and not in the model's own."""
    return all(layer.in_place and layer.get_seq_length() == num_slots for layer in layers)


def ids_of(eos: SupportsIndex | Iterable[SupportsIndex] | None) -> frozenset[int]:
    """The ids of one or several end tokens, as ints: an array's own elements equal none.

    Raises:
        TypeError: something that is no integer.
    """
    if eos is None:
        return frozenset()
    try:
        return frozenset({operator.index(eos)})  # type: ignore[arg-type]
    except TypeError:
        return frozenset(map(operator.index, eos))  # type: ignore[arg-type]


def _until(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """`tokens` up to and with the first end: `generate` pads behind it."""
    end = next((index for index, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]


def _pad_token(*configs: GenerationConfig) -> int:
    """Any id does: padding is masked."""
    return next((c.pad_token_id for c in configs if isinstance(c.pad_token_id, int)), 0)
