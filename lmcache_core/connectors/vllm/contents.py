"""A vLLM request's identity: its tokens, salt, adapter and images."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from lmcache_core.connectors.vllm.known_as import in_epoch, tell_adapter, tell_epoch
from lmcache_core.errors import LMCacheError
from lmcache_core.identity import Content, Extra, ModelRecord, encode, weights_fingerprint

log = logging.getLogger(__name__)

OnGrowth: TypeAlias = Callable[[Any, Content, int], None]
"""Is told a request, its content, and the first of the tokens that this has just learnt."""

_State: TypeAlias = tuple[tuple[str, int, int, int, int], ...]


class Contents:
    """Makes the contents of one engine's requests. For one thread."""

    def __init__(self, model: ModelRecord, on_growth: OnGrowth | None = None) -> None:
        self._model = model
        self._on_growth = on_growth
        self._epoch = b""
        self._adapters: dict[tuple[str, int, str], tuple[_State, bytes | None]] = {}
        self._said: set[str] = set()

    def new_epoch(self, epoch: bytes) -> None:
        """From now on nothing is shared with what was made before."""
        self._epoch = epoch
        tell_epoch(epoch)

    def of(self, request: Any) -> Content | None:
        """The request's content, empty as yet; None for one that can't be named, which is logged once.

        `grow` it as its tokens become known.
        """
        if reason := self._reason(request):
            self._leave_out(reason)
            return None
        lora = b""
        if (adapter := request.lora_request) is not None:
            fingerprint = self._adapter(adapter)
            if fingerprint is None:
                self._leave_out(f"the files of adapter {adapter.lora_name!r} can't be read, or have changed")
                return None
            lora = fingerprint
        salt = request.cache_salt
        return Content(
            self._model, lora=in_epoch(lora, self._epoch), salt=b"" if salt is None else str(salt).encode()
        )

    def grow(self, content: Content, request: Any, num_tokens: int) -> None:
        """Extends `content` to the request's first `num_tokens` tokens."""
        start = content.num_tokens
        if num_tokens > start:
            extras = [
                Extra(feature.mm_position.offset, "multimodal", feature.identifier.encode())
                for feature in request.mm_features
                if start <= feature.mm_position.offset < num_tokens
            ]
            content.extend(list(request.all_token_ids[start:num_tokens]), extras)
            if self._on_growth is not None:
                self._on_growth(request, content, start)

    def _reason(self, request: Any) -> str:
        if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
            return "prompt embeddings have no tokens to be known by"
        if getattr(request, "resumable", False):
            return "the tokens of a streamed prompt may still change"
        if request.pooling_params is not None:
            return "only requests that generate are cached"
        return ""

    def _adapter(self, adapter: Any) -> bytes | None:
        """32 bytes over an adapter's files; None if it can't be told what was loaded."""
        if getattr(adapter, "load_inplace", False) or getattr(adapter, "tensorizer_config_dict", None):
            return None
        name = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        folder = Path(adapter.lora_path)
        try:
            state = _state(folder)
            if name not in self._adapters:
                weights = weights_fingerprint(folder)
                config = (folder / "adapter_config.json").read_bytes()
                digest = blake2b(encode([weights, config]), digest_size=32, person=b"lmcache-core l2")
                self._adapters[name] = state, digest.digest()
                tell_adapter(adapter.lora_name, digest.digest())
        except (OSError, LMCacheError) as error:
            if name not in self._adapters:
                log.warning("adapter %s: %s", adapter.lora_name, error)
                self._adapters[name] = (), None
            return None
        known, fingerprint = self._adapters[name]
        # Of files that are others by now, vLLM may hold the old weights or the new ones.
        return fingerprint if state == known else None

    def _leave_out(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("a request is left out of the cache, and others like it will be: %s", reason)


def _state(folder: Path) -> _State:
    """Another one when a file of an adapter changes."""
    with os.scandir(folder) as entries:
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)
