"""A connector to stand beside ours in vLLM's MultiConnector: it promises KV, and doesn't have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

PROMISED = 512


@dataclass
class Blocks(KVConnectorMetadata):  # type: ignore[misc]
    """That were promised for a step."""

    ids: list[int] = field(default_factory=list)


@dataclass
class Greeting(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Its handshake, in which ours is lost."""

    text: str = "hello"


class Partner(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Promises the first `PROMISED` tokens of each prompt once, in the step that computes what follows.

    It fills none of the blocks, and says so when vLLM asks, which is after the step's KV was saved.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._seen: set[tuple[int, ...]] = set()
        self._planned = Blocks()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        known = tuple(request.prompt_token_ids) in self._seen
        return (0 if known or request.num_tokens <= PROMISED else PROMISED - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._seen.add(tuple(request.prompt_token_ids))
            [block_ids] = blocks.get_block_ids()
            end = PROMISED // self._block_tokens
            self._planned.ids += block_ids[end - num_external_tokens // self._block_tokens : end]

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        planned, self._planned = self._planned, Blocks()
        return planned

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def get_handshake_metadata(self) -> Greeting:
        return Greeting()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing comes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing comes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing is kept."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {*self._get_connector_metadata().ids}
