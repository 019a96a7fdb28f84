"""What our sides tell each other, as vLLM carries it between the scheduler and the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_core.connectors.vllm.plan import Report, Step
from lmcache_core.connectors.vllm.ranks import RankAddress


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


@dataclass
class AddressMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Workers to scheduler, once, when the workers run in processes of their own."""

    address: RankAddress
