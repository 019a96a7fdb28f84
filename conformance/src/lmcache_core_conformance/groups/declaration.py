"""Declaration: the capabilities are what the contract has them be, before anything is concluded from them."""

from __future__ import annotations

from lmcache_core.errors import PluginError
from lmcache_core.storage.checks import checked_capabilities
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.verdicts import Violation, check


class Declaration(Group):
    group = "declaration"

    def test_capabilities_are_declared_as_the_contract_has_them(self) -> None:
        """Queues are sized and paths chosen by them: a wrong one breaks the core far from where it stands."""
        backend = self.bench.harness.build(self.bench.place().options)
        declared = backend.capabilities
        _must_make_sense(declared, "its capabilities")
        host = self.bench.host(backend)
        try:
            opened = backend.open(host)
        finally:
            backend.close()
            host.close()
        if opened is not None:
            _must_make_sense(opened, "what open returned")
        now = backend.capabilities
        check(now == declared, f"its capabilities were {declared} before it was opened, and are {now} after")


def _must_make_sense(offers: object, what: str) -> None:
    try:
        checked_capabilities(offers, what)
    except PluginError as error:
        raise Violation(str(error)) from error
