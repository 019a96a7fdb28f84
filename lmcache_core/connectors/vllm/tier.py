"""A backend as a secondary tier of vLLM's own OffloadingConnector (0.32).

`secondary_tiers: [{"type": "lmcache-core", "module_path": "lmcache_core.connectors.vllm.tier", …}]`

vLLM's connector keeps KV in CPU memory of its own; a secondary tier is told of every chunk that arrives
there, and asked for those that aren't there any more. All calls come from the scheduler's thread and must
not block, and nothing may raise into it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from lmcache_core.connectors.vllm.guard import guarded, nothing
from lmcache_core.connectors.vllm.tier_frames import ChunkFrames, HostRows
from lmcache_core.connectors.vllm.tier_identity import offload_identity
from lmcache_core.connectors.vllm.tier_jobs import Chunk, Job, JobQueue
from lmcache_core.connectors.vllm.tier_settings import read_tier_settings
from lmcache_core.identity import StorageKey
from lmcache_core.registry import discover
from lmcache_core.storage.serial import SerialThread
from lmcache_core.tiers import Marks

log = logging.getLogger(__name__)

TYPE = "lmcache-core"
NUM_LOAD_THREADS = 2
PREFIX = "vllm:lmcache_core_tier_"
COUNTERS: Mapping[str, str] = {
    "rejected_frames": "Stored chunks that turned out damaged, and were dropped.",
    "shed_stores": "Chunks that the tier could not take.",
}
SHUTDOWN_S = 4.0
"""Within the five seconds that vLLM gives its processes to end."""


@dataclass(slots=True)
class _Request:
    """What one unfinished request has asked. A no stays one, so that it can't ask in a circle."""

    names: dict[OffloadKey, StorageKey] = field(default_factory=dict)
    answers: dict[OffloadKey, bool] = field(default_factory=dict)
    asked: dict[OffloadKey, float] = field(default_factory=dict)
    """Keys that a store was asked for, and until when an answer counts."""
    unasked: list[OffloadKey] = field(default_factory=list)
    """Of these, the ones of this step."""
    marks: Marks | None = None
    """When its first chunk was stored: it never evicts its own beginning."""
    stale: bool = False
    """It began before a reset: its KV may be of other weights."""


class SecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks that leave vLLM's CPU memory, in a backend of ours: framed, checksummed, within a bound.

    Raises:
        ConfigError: the entry in `secondary_tiers` can't be used; says what to change.
        PluginError: a plugin doesn't keep what it declares.
        UnsupportedModel: a model or setting whose KV can't be told apart.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = read_tier_settings(options)
        self.locality = None if settings.locality is None else Locality(settings.locality)
        identity = offload_identity(offloading_spec, self.block_size_bytes, settings.fingerprint_folder)
        self._chunk_tokens = identity.model.chunk_tokens
        self._chunk_nbytes = identity.chunk_nbytes
        self._rows = HostRows(primary_kv_view)
        try:
            self._frames = ChunkFrames(identity, settings.cache_config(self._chunk_tokens), discover())
        except BaseException:
            self._rows.release()
            raise
        self._ask_s = float(settings.deadline)
        self._job_s = float(settings.job_deadline)
        self._loads = JobQueue(
            "lmcache-vllm-load", self._load, num_threads=NUM_LOAD_THREADS, limit=settings.jobs
        )
        self._stores = JobQueue("lmcache-vllm-store", self._store, num_threads=1, limit=settings.jobs)
        self._asks = SerialThread("lmcache-vllm-ask")
        self._requests: dict[str, _Request] = {}
        self._refused: list[JobResult] = []
        log.info("secondary tier %s: %s of model %s", settings.name, identity.part, identity.model.key)

    # -- requests --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = _Request()
        return RequestOffloadingContext()

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS at once where the tier's index is the truth; else RETRY until the store answers."""
        request = self._request(req_context)
        answer = request.answers.get(key)
        if answer is None and key not in request.asked:
            [name] = self._names(request, [key])
            answer = self._frames.known(name)
            if answer is None:
                request.asked[key] = time.monotonic() + self._ask_s
                request.unasked.append(key)
        elif answer is None and time.monotonic() >= request.asked[key]:
            answer = request.answers.setdefault(key, False)
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request in self._requests.values():
            if request.unasked:
                keys, request.unasked = request.unasked, []
                names = self._names(request, keys)
                self._asks.submit(functools.partial(self._ask, request.answers, keys, names))

    @guarded(nothing)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._frames.touch(self._names(self._request(req_context), list(keys)))

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)

    # -- transfers -------------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self._request(job_metadata.req_context).stale:
            self._refused.append(JobResult(job_id=job_metadata.job_id, success=False))
        else:
            self._submit(self._stores, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        refused, self._refused = self._refused, []
        loads = [self._result(job, tuple(job.done) or None) for job in self._loads.finished()]
        stores = [self._result(job, None) for job in self._stores.finished()]
        return [*refused, *loads, *stores]

    @guarded(nothing)
    def drain_jobs(self) -> None:
        """Ends all transfers. vLLM calls this when its weights may change: nothing is shared across it."""
        self._loads.end_all()
        self._stores.end_all()
        self._frames.new_epoch()
        self._requests = {req_id: _Request(stale=True) for req_id in self._requests}

    @guarded(nothing)
    def shutdown(self) -> None:
        """Takes what was submitted and writes what waits, as far as four seconds allow."""
        started = time.monotonic()
        try:
            self._loads.end_all()
            self._stores.close(started + SHUTDOWN_S / 2)
            self._loads.close(started + SHUTDOWN_S / 2)
            self._asks.close()
            self._frames.close(started + SHUTDOWN_S)
        finally:  # vLLM unmaps its memory next, whatever happened
            self._loads.end_all()
            self._stores.end_all()
            self._rows.release()

    # -- metrics ---------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {PREFIX + name: OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        if not (counts := self._frames.losses.take()):
            return None
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(PREFIX + name, count)
        return stats

    # -- on threads of our own -------------------------------------------------------------------

    def _ask(
        self, answers: dict[OffloadKey, bool], keys: Sequence[OffloadKey], names: Sequence[StorageKey]
    ) -> None:
        """Answers for `keys`. What comes after a chunk that isn't held is of no use, and isn't asked for."""
        if all(key in answers for key in keys):
            return  # given up meanwhile
        num_held = self._frames.num_held(names)
        for position, key in enumerate(keys):
            answers.setdefault(key, position < num_held)

    def _load(self, job: Job) -> None:
        def scatter(position: int, segments: Sequence[memoryview]) -> bool:
            chunk = job.chunks[position]

            def copy() -> None:
                self._rows.scatter(chunk.row, segments)
                job.done.append(chunk.key)

            return job.touch(copy)

        names = [chunk.name for chunk in job.chunks]
        self._frames.load(names, [chunk.first_token for chunk in job.chunks], scatter)

    def _store(self, job: Job) -> None:
        for chunk in job.chunks:

            def gather(segments: Sequence[memoryview], row: int = chunk.row) -> bool:
                return job.touch(lambda: self._rows.gather(row, segments))

            if not self._frames.store(chunk.name, chunk.first_token, gather, job.marks):
                return  # no room: the others would wait for it in vain, one after the other
            job.done.append(chunk.key)

    # -- inside ----------------------------------------------------------------------------------

    def _request(self, req_context: ReqContext) -> _Request:
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._requests[req_context.req_id] = _Request()
        return request

    def _names(self, request: _Request, keys: Sequence[OffloadKey]) -> list[StorageKey]:
        new = [key for key in keys if key not in request.names]
        if new:
            digests = [get_offload_block_hash(key) for key in new]
            request.names.update(zip(new, self._frames.names(digests), strict=True))
        return [request.names[key] for key in keys]

    def _submit(self, queue: JobQueue, submitted: TransferJob) -> None:
        """Whatever happens, vLLM gets a result, or it would wait for ever."""
        try:
            job = self._job(submitted)
        except Exception:  # recorded boundary: a host engine's hook
            log.exception("a transfer can't be done; vLLM goes on without")
            self._refused.append(JobResult(job_id=submitted.job_id, success=False))
            self._request(submitted.req_context).answers.update(dict.fromkeys(submitted.keys, False))
        else:
            queue.submit(job)

    def _job(self, submitted: TransferJob) -> Job:
        context, keys = submitted.req_context, list(submitted.keys)
        request = self._request(context)
        if request.marks is None:
            request.marks = self._frames.mark()
        names, rows = self._names(request, keys), submitted.chunk_ids
        chunks = [
            Chunk(key, name, context.get_offload_key_position(key) - self._chunk_tokens, int(row))
            for key, name, row in zip(keys, names, rows, strict=True)
        ]
        now = time.monotonic()
        deadline = now + self._job_s
        return Job(submitted.job_id, context.req_id, chunks, request.marks, started=now, deadline=deadline)

    def _result(self, job: Job, successful_keys: tuple[OffloadKey, ...] | None) -> JobResult:
        if not job.succeeded and (request := self._requests.get(job.request_id)) is not None:
            for chunk in job.chunks:
                if chunk.key not in job.done:
                    request.answers[chunk.key] = False  # once failed, it is computed
        return JobResult(
            job_id=job.job_id,
            success=job.succeeded,
            successful_keys=successful_keys,
            transfer_time=time.monotonic() - job.started,
            transfer_bytes=len(job.done) * self._chunk_nbytes,
        )


def __getattr__(name: str) -> type[SecondaryTier]:
    """vLLM looks the class up under the tier's type."""
    if name != TYPE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return SecondaryTier
