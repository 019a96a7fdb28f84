"""Our plans and reports as vLLM carries them between the scheduler and the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from lmcache_core.connectors.vllm.plan import Report, Step


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, with every step."""

    step: Step = field(default_factory=Step)


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, when loads failed."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        """One report of several ranks."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.with_rank(other.report))
