"""The conformance suite of lmcache_core: one set of properties that certifies any storage backend.

Three doors: subclass `BackendConformance` in a plugin's tests, run `lmcache-core conformance run`, or
call `run`. `describe` makes a document of the report, which `encode` and `render` write.
"""

from lmcache_core_conformance.baselines import RawDriver
from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.figures import Figure
from lmcache_core_conformance.harness import Deviation, Harness
from lmcache_core_conformance.html import render
from lmcache_core_conformance.report import ReportDocument, ReportError, describe, encode, parse
from lmcache_core_conformance.runner import Report, Result, run
from lmcache_core_conformance.suite import PROPERTIES, BackendConformance
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, Verdict, Violation

__all__ = [
    "PROPERTIES",
    "BackendConformance",
    "Deviation",
    "Fault",
    "Figure",
    "Harness",
    "NotApplicable",
    "RawDriver",
    "Report",
    "ReportDocument",
    "ReportError",
    "Result",
    "Unproven",
    "Verdict",
    "Violation",
    "describe",
    "encode",
    "parse",
    "render",
    "run",
]
