"""The cpu tier keeps every property of the conformance suite that its capabilities give a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmcache_core_conformance import BackendConformance, Harness
from lmcache_core_cpu.backend import CpuBackend


class CpuHarness(Harness):
    backend = CpuBackend

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {}


class TestCpu(BackendConformance):
    harness = CpuHarness()
    harness.slack_s = 10.0  # of a busy machine; its report is made with the suite's own
