"""The conformance suite of lmcache_core: one set of properties that certifies any storage backend.

Three doors: subclass `BackendConformance` in a plugin's tests, run `lmcache-core conformance run`, or
call `run`.
"""

from lmcache_core_conformance.harness import Deviation, Harness
from lmcache_core_conformance.runner import Report, Result, run
from lmcache_core_conformance.suite import PROPERTIES, BackendConformance
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, Verdict, Violation

__all__ = [
    "PROPERTIES",
    "BackendConformance",
    "Deviation",
    "Harness",
    "NotApplicable",
    "Report",
    "Result",
    "Unproven",
    "Verdict",
    "Violation",
    "run",
]
