"""vLLM's own TieringOffloadingManager over a tier of ours, without a model, driven as its scheduler does."""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, and torch's
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm_offload_spec import CpuTieringSpec

BLOCK, LAYERS, HEADS, DIM = 32, 2, 1, 32
CHUNK_NBYTES = LAYERS * HEADS * BLOCK * 2 * DIM * 4
PATIENCE_S = 60.0


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))


def manager_of(spec: CpuTieringSpec, vllm_config: object, kv_cache_config: object) -> Any:
    """As vLLM's connector builds it: the tier finds the two configurations here."""
    return spec.get_manager()


class Tiering:
    """vLLM's manager over `num_chunks` of CPU memory and one tier of ours.

    vLLM keeps a group of the model's layers for each of `windows`; None is full attention.
    """

    def __init__(
        self,
        model: Path,
        *,
        num_chunks: int = 2,
        algorithm: str = "sha256",
        layout: str | None = "LBHNC",
        windows: Sequence[int | None] = (None,),
        **entry: Any,
    ) -> None:
        engine_id = str(uuid.uuid4())
        names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS))
        hf = Config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=99)
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(model),
                hf_config=hf,
                hf_text_config=hf,
                architecture="LlamaForCausalLM",
                dtype=torch.float32,
                quantization=None,
                max_model_len=4096,
                runner_type="generate",
                is_encoder_decoder=False,
            ),
            cache_config=SimpleNamespace(
                cache_dtype="auto", calculate_kv_scales=False, prefix_caching_hash_algo=algorithm
            ),
            parallel_config=SimpleNamespace(),
            load_config=SimpleNamespace(load_format="auto", download_dir=None),
            speculative_config=None,
            lora_config=entry.pop("lora_config", None),
            kv_transfer_config=SimpleNamespace(engine_id=engine_id),
            compilation_config=SimpleNamespace(
                static_forward_context={name: SimpleNamespace(isa="vec") for name in names}
            ),
        )
        sizes = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
        specs = [
            SlidingWindowSpec(sliding_window=window, **sizes) if window else FullAttentionSpec(**sizes)
            for window in windows
        ]
        kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=list(names)) for spec in specs]
        )
        given = {"backend": "faulty", "capacity": "4MiB", "staging": "1MiB"}
        tier = {key: value for key, value in {**given, **entry}.items() if value is not None}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=BLOCK, layer_names=names, group_id=0),),
            worker_kv_bytes_per_block=CHUNK_NBYTES,
            enable_kv_cache_events=False,
            extra_config={
                "cpu_bytes_to_use": num_chunks * CHUNK_NBYTES,
                "secondary_tiers": [
                    {"type": "lmcache-core", "module_path": "lmcache_core.connectors.vllm.tier", **tier}
                ],
            },
            engine_id=engine_id,
            model=OffloadingModelConfig(name=str(model), dtype="float32"),
            cache=OffloadingCacheConfig(tokens_per_hash=BLOCK, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
            kv_cache_layout=layout,
        )
        self.shared_memory = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
        self.manager = manager_of(CpuTieringSpec(config), vllm_config, kv_cache_config)
        [self.tier] = self.manager.secondary_tiers
        self._view = self.manager.primary_tier.get_kv_memoryview()

    def request(self, name: str, *keys: bytes) -> ReqContext:
        """A request whose first chunks have these keys."""
        context = ReqContext(name)
        for position, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, position * BLOCK)
        self.manager.on_new_request(context)
        return context

    def row(self, chunk: int) -> bytes:
        return bytes(self._view.cast("B")[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES])

    def store(self, request: ReqContext, *keys: bytes) -> list[int]:
        """vLLM computes these chunks, each full of its key's first byte, and offloads them. Their rows."""
        prepared = self.manager.prepare_store(list(keys), request)
        rows = [int(chunk) for chunk in prepared.store_spec.chunk_ids]
        with self._view.cast("B") as memory:
            for key, row in zip(prepared.keys_to_store, rows, strict=True):
                memory[row * CHUNK_NBYTES : (row + 1) * CHUNK_NBYTES] = key[:1] * CHUNK_NBYTES
        if rows:
            self.manager.complete_store(prepared.keys_to_store, request)
        self.until_idle()
        assert self.tier._frames.chain.flush(time.monotonic() + PATIENCE_S)
        return rows

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, reached: Callable[[], bool]) -> None:
        """Steps as vLLM does, which doesn't wait."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < give_up_at
            self.step()
            os.sched_yield()

    def until_idle(self) -> None:
        self.until(lambda: not self.manager.has_pending_work())

    def found(self, request: ReqContext, *keys: bytes) -> list[LookupResult]:
        """What vLLM is told in the end."""
        answers: list[LookupResult] = []

        def settled() -> bool:
            answers[:] = [self.manager.lookup(key, request) for key in keys]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*answers}

        self.until(settled)
        return answers
