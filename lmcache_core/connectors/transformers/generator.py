"""CachedGenerator: a Transformers causal LM that reuses the KV of prefixes it has seen before."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig

from lmcache_core.config import CacheConfig, load_config
from lmcache_core.connectors.transformers.adapters import Adapters
from lmcache_core.connectors.transformers.forward import Forward, unwrapped
from lmcache_core.connectors.transformers.identity import model_record, part_of
from lmcache_core.connectors.transformers.run import Generation, PromptReport, Run, ids_of
from lmcache_core.connectors.transformers.support import check_model, probe
from lmcache_core.connectors.transformers.watch import Watch
from lmcache_core.connectors.transformers.workspace import Workspace
from lmcache_core.engine import CacheEngine
from lmcache_core.errors import LMCacheError
from lmcache_core.events import Observer
from lmcache_core.identity import TAIL_UNIT, Content, ModelRecord, Part
from lmcache_core.registry import Registry

log = logging.getLogger(__name__)

TokenIds: TypeAlias = "Tensor | Sequence[int] | Sequence[Sequence[int]]"


class CachedGenerator:
    """Generates with a loaded model, loading the KV of known prefixes and storing what is new.

    `config` selects the tiers: a `CacheConfig`, a mapping, or the path of a YAML file; or a `CacheEngine`
    made for this model and part, which stays the caller's to close. The model is checked, probed with a
    few tokens and fingerprinted, which reads all its weights once (about a second a gigabyte and core).

    Trouble with a tier costs at most its deadline; the tokens are then computed. If the model changes after
    this was made (weights, hooks, settings), it computes everything, stores nothing and says so once in the
    log: make a new one. LoRA adapters (PEFT) that were there may be switched at any time.

    Thread-safe as far as the model is.

    Raises:
        UnsupportedModel: the model's KV can't be proved to belong to its tokens; says why.
        ConfigError, PluginError: the tiers can't be built as configured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: CacheConfig | Mapping[str, object] | Path | str | CacheEngine,
        *,
        registry: Registry | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._model = unwrapped(model)
        check_model(self._model)
        self._adapters = Adapters(model, self._model)
        self._forward = Forward(self._model)
        shape = probe(self._model, self._forward)
        self._watch = Watch(self._model)  # before the weights are read: no change falls in between
        if isinstance(config, CacheEngine):
            self._owns_engine = False
            record = model_record(self._model, self._adapters, shape, config.model.chunk_tokens)
            if config.model != record or config.part != part_of(shape):
                raise LMCacheError("this engine was made for another model: see `differences` of the records")
            self.engine = config
        else:
            self._owns_engine = True
            settings = config if isinstance(config, CacheConfig) else load_config(config)
            record = model_record(self._model, self._adapters, shape, settings.chunk_tokens)
            self.engine = CacheEngine(
                settings, model=record, part=part_of(shape), registry=registry, observers=observers
            )
        self._workspace = Workspace(shape)
        self._kind = (self._model.dtype, self._model.device)
        self._closed = False
        self._said_changed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the engine unless it was given, and lets go of the KV memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._workspace.close()
            if self._owns_engine:
                self.engine.close()

    def generate(
        self,
        input_ids: TokenIds,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        eos_token_id: int | Sequence[int] | None = None,
        generation_config: GenerationConfig | None = None,
        salt: bytes = b"",
        store: bool = True,
    ) -> list[Generation]:
        """Continues each prompt; greedily, unless a `generation_config` says how to sample.

        `input_ids` is one prompt or a batch of them, as lists or as `[rows, tokens]` with padding that
        `attention_mask` marks with 0 (on either side). Rows are filled one by one, each from its own
        cached prefix, and decoded together, left-padded. `eos_token_id` None means the model's own, `()`
        none. `store` False loads only. `salt` separates tenants: no prefix is shared across salts.

        Raises:
            ValueError: an empty prompt, an id that is negative or no int32, an `attention_mask` that isn't
                one, or an option of `generation_config` that isn't offered, such as beams.
            TypeError: ids that aren't integers.
            LMCacheError: closed, or the model has another dtype or device by now.
        """
        started = time.perf_counter()
        rows = _rows(input_ids, attention_mask)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if generation_config is not None:
            generation_config = _checked(generation_config, self._model.generation_config, max_new_tokens)
            max_new_tokens = generation_config.max_new_tokens
        run = self._run(rows, salt, store=store, started=started)
        lengths = [len(row) for row in rows]
        with torch.inference_mode(), self._workspace.batch(lengths, max_new_tokens) as batch:
            if generation_config is not None:
                return run.sample(batch, generation_config)
            eos = self._model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
            return run.greedy(batch, max_new_tokens, ids_of(eos))

    def prefill(self, input_ids: Tensor | Sequence[int], *, salt: bytes = b"") -> PromptReport:
        """Makes the KV of one text known, its tail included, so that prompts starting with it load it.

        Worth it for a document or system prompt that several prompts share: what they share ends
        anywhere, and only prompts' own ends are stored as tails.

        Raises:
            ValueError: no token, or more than one row.
            LMCacheError: closed.
        """
        rows = _rows(input_ids, None)
        if len(rows) != 1:
            raise ValueError(f"prefill takes one prompt, not {len(rows)}")
        run = self._run(rows, salt, store=True, started=time.perf_counter())
        content = run.contents[0]
        if content is not None and len(rows[0]) - self.engine.lookup(content).num_tokens < TAIL_UNIT:
            return PromptReport(num_tokens=len(rows[0]), num_loaded_tokens=0, num_computed_tokens=0)
        with torch.inference_mode(), self._workspace.batch([len(rows[0])], 0) as batch:
            return run.fill(batch, 0, len(rows[0]))[0]

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was stored has reached every tier it goes to; False if time ran out."""
        return self.engine.flush(timeout_s)

    def _run(self, rows: Sequence[Tensor], salt: bytes, *, store: bool, started: float) -> Run:
        adapters = self._adapters.state()  # before anything is named: no switch falls in between
        return Run(
            self._model,
            self._forward,
            self.engine,
            rows,
            self._contents(rows, salt),
            store=store,
            unchanged=lambda: self._adapters.state() == adapters and not self._watch.changed(),
            started=started,
        )

    def _contents(self, rows: Sequence[Tensor], salt: bytes) -> list[Content | None]:
        """The rows' identities; None where the cache must not be used."""
        if self._closed:
            raise LMCacheError("this generator is closed")
        if self._adapters.changes_weights() or self._watch.changed():
            if not self._said_changed:
                self._said_changed = True
                log.warning(
                    "the model's weights, hooks, settings or mode changed since the cache was attached: "
                    "nothing is loaded or stored any more; make a new CachedGenerator"
                )
            if (now := (self._model.dtype, self._model.device)) != self._kind:
                raise LMCacheError(
                    f"the model became {now[0]} on {now[1]} after the cache was attached to it as "
                    f"{self._kind[0]} on {self._kind[1]}: make a new CachedGenerator"
                )
            return [None] * len(rows)
        lora = self._adapters.fingerprint()
        return [self.engine.content(row.numpy(), salt=salt, lora=lora) for row in rows]


def identify(model: torch.nn.Module, chunk_tokens: int) -> tuple[ModelRecord, Part]:
    """The record and part under which a `CachedGenerator` of this model stores. Reads all its weights.

    Raises:
        UnsupportedModel: as `CachedGenerator`.
    """
    base = unwrapped(model)
    check_model(base)
    shape = probe(base, Forward(base))
    return model_record(base, Adapters(model, base), shape, chunk_tokens), part_of(shape)


def _rows(input_ids: TokenIds, attention_mask: Tensor | None) -> list[Tensor]:
    """Each row's own tokens, int64, without its padding."""
    if not isinstance(input_ids, Tensor | list | tuple):
        input_ids = torch.as_tensor(input_ids)
    if not isinstance(input_ids, Tensor):
        first: Any = input_ids[0] if input_ids else 0
        nested = not isinstance(first, int) and getattr(first, "ndim", 1) > 0
        batch: Any = input_ids if nested else [input_ids]
        if attention_mask is not None:
            raise ValueError("an attention_mask goes with a tensor; lists hold no padding")
        rows = [_whole(torch.as_tensor(row)) for row in batch]
    else:
        table = _whole(input_ids)
        table = table.unsqueeze(0) if table.dim() == 1 else table
        if table.dim() != 2:
            raise ValueError(f"input_ids must be [tokens] or [rows, tokens], not {list(input_ids.shape)}")
        if attention_mask is None:
            rows = list(table)
        else:
            mask = attention_mask.detach().cpu()
            mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
            if mask.shape != table.shape:
                raise ValueError(
                    f"an attention_mask of {list(mask.shape)} for input_ids of {list(table.shape)}"
                )
            own = mask.bool()
            if not torch.equal(mask, own.to(mask.dtype)):
                raise ValueError(
                    "an attention_mask has 1 on a prompt's tokens and 0 on padding, nothing else"
                )
            rows = [row[its] for row, its in zip(table, own, strict=True)]
    for index, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompt {index} has no token")
    if not rows:
        raise ValueError("no prompt given")
    return rows


def _whole(ids: Tensor) -> Tensor:
    """Int64 on the host. No id is rounded: it would be another token's."""
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise TypeError(f"token ids must be integers, not {ids.dtype}")
    return ids.detach().cpu().long()


def _checked(config: GenerationConfig, defaults: GenerationConfig, max_new_tokens: int) -> GenerationConfig:
    """`config` as the model's `generate` gets it, which fills what it leaves open from `defaults`."""

    def option(name: str) -> Any:
        value = getattr(config, name, None)
        return getattr(defaults, name, None) if value is None else value

    if (option("num_beams") or 1) > 1 or (option("num_return_sequences") or 1) > 1:
        raise ValueError("beams and several sequences a prompt are not offered: repeat the prompt instead")
    for name in ("cache_implementation", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if option(name) is not None:
            raise ValueError(f"{name} is not offered: generation goes on from a cache that is filled already")
    config = copy.deepcopy(config)
    if config.max_new_tokens is None:
        if config.max_length not in (None, defaults.max_length):
            raise ValueError("say max_new_tokens in place of max_length")
        config.max_new_tokens = max_new_tokens
    config.use_cache = True  # some models' default is False, and generate() then feeds all tokens again
    config.return_dict_in_generate = False
    return config
