"""vLLM's tiering offload with a worker that copies by the CPU: the spec that vLLM brings refuses a CPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import lmcache_core.engine.engine as engine_module


class CopyWorker(OffloadingWorker):
    """Copies blocks at once, in the call that submits them."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int):
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._blocks = [each.tensor for each in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk)
            for each in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_blocks=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_blocks=True)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All is done when it is submitted."""

    def shutdown(self) -> None:
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, *, to_blocks: bool) -> bool:
        first = blocks.block_indices[0] % self._blocks_per_chunk
        for position, block in enumerate(blocks.block_ids):
            chunk, place = divmod(first + position, self._blocks_per_chunk)
            for here, there in zip(self._blocks, self._chunks, strict=True):
                nbytes = here.shape[1]
                cell = there[int(chunks.chunk_ids[chunk]), place * nbytes : (place + 1) * nbytes]
                if to_blocks:
                    here[int(block)].copy_(cell)
                else:
                    cell.copy_(here[int(block)])
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Tells the tier of the registry that the test's process made, too."""

    def get_manager(self) -> Any:
        from lmcache_core.connectors.vllm import tier

        tier.discover = engine_module.discover
        return super().get_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
