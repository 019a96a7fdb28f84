"""What our sides tell each other, as vLLM carries it between the scheduler and the workers."""

from __future__ import annotations

from collections.abc import Mapping
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
    where: bool = False
    """The scheduler doesn't know yet how it reaches the ranks' lookups."""


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, with steps that it wants to hear of."""

    report: Report | None = None
    addresses: Mapping[int, RankAddress] = field(default_factory=dict)
    """By rank, when it asked where they are."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        """One report of several ranks."""
        assert isinstance(other, ReportMetadata)
        report = self.report
        if report is None:
            report = other.report
        elif other.report is not None:
            report = report.with_rank(other.report)
        return ReportMetadata(report, {**self.addresses, **other.addresses})


@dataclass
class AddressMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Workers to scheduler, once, when the workers run in processes of their own."""

    address: RankAddress
