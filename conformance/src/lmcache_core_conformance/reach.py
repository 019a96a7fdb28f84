"""How a property reaches behind a store: by the harness's hooks, each held to the effect it must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.behind import Behind, Fault
from lmcache_core_conformance.bench import Bench, Place
from lmcache_core_conformance.driver import Store
from lmcache_core_conformance.known import Known
from lmcache_core_conformance.values import PAGE, difference, key_named, value_of
from lmcache_core_conformance.verdicts import Unproven, check

_DELAYS = (Fault.STALLED, Fault.TRICKLING)
_PROVEN = Known[set[str]]()
"""Which hooks that measure were seen to."""


class Attempt(Protocol):
    """A call made while a fault was there."""

    @property
    def took_s(self) -> float: ...

    @property
    def statuses(self) -> list[Status]: ...


class Caller(Protocol):
    """Who makes calls: a `Store`, or a `Core`."""

    @property
    def calls(self) -> Sequence[Attempt]: ...


class Reach:
    """The hooks that act on one store. Each is followed by a look at what it did.

    Every method raises Unproven where the hook is missing, or another one by which its effect is seen,
    and Violation where it had no effect: a property that went on from there would prove nothing.
    """

    def __init__(self, bench: Bench, place: Place) -> None:
        self._bench = bench
        self._harness = bench.harness
        self._medium = bench.capabilities.medium
        self._directory = place.directory

    def raw_put(self, key: StorageKey, value: bytes) -> None:
        """Makes `value`, which is not what is there, the content of the medium."""
        self._harness.raw_put(self._directory, key, value)
        seen = self._harness.raw_get(self._directory, key)
        check(seen is not None, "harness hook `raw_put` left nothing that hook `raw_get` sees")
        if seen is not None and seen != value:
            check(False, f"harness hook `raw_put` did not leave its bytes: {difference(value, seen)}")

    def raw_delete(self, key: StorageKey) -> None:
        """Removes the stored value of `key`."""
        before = self._harness.raw_get(self._directory, key)
        check(before is not None, "harness hook `raw_get` sees nothing of a stored value")
        self._harness.raw_delete(self._directory, key)
        left = self._harness.raw_get(self._directory, key)
        check(left is None, "harness hook `raw_delete` left the value in the medium")

    def litter(self) -> set[str]:
        """Leaves foreign things; returns the paths of those that are files."""
        is_default = getattr(self._harness.litter, "__func__", None) is Behind.litter
        if is_default and self._medium != "file":
            raise Unproven("harness hook `litter` is missing")
        if self._medium == "file":
            before = self._paths()
            self._harness.litter(self._directory)
            foreign = self._paths() - before
            check(foreign, "harness hook `litter` left nothing in the store")
            return foreign
        objects = self.medium_objects()
        self._harness.litter(self._directory)
        more = self.medium_objects()
        check(more > objects, "harness hook `litter` left nothing that hook `medium_objects` counts")
        return set()

    def paths(self, foreign: set[str]) -> set[str]:
        """Those of `foreign` that are still there."""
        return foreign & self._paths()

    def medium_bytes(self) -> int:
        """What the store occupies, seen from outside."""
        self._prove("medium_bytes")
        return self._harness.medium_bytes(self._directory)

    def medium_objects(self) -> int:
        """How many files, objects, rows or keys the store consists of, seen from outside."""
        self._prove("medium_objects")
        return self._harness.medium_objects(self._directory)

    def requests_of(self, store: Store, work: Callable[[], object]) -> int:
        """How many requests the server was sent meanwhile, after a put that it must have been sent."""
        key = key_named("counted")
        before = self._harness.num_requests(self._directory)
        store.put(key, value_of(key, 1, PAGE))
        counted = self._harness.num_requests(self._directory)
        check(counted > before, f"harness hook `num_requests` did not count a put: {before}, then {counted}")
        work()
        return self._harness.num_requests(self._directory) - counted

    @contextmanager
    def faulty(self, fault: Fault, caller: Caller) -> Iterator[None]:
        """While inside, the medium has this fault; a call that `caller` makes meanwhile must meet it.

        A call meets a stalled or trickling medium by taking long, a full one by being refused, and any
        other by failing.
        """
        first = len(caller.calls)
        with self._bench.inside(self._harness.faulty(self._directory, fault)):
            yield
            calls = caller.calls[first:]
            met = any(self._meets(fault, call) for call in calls)
            told = [_told(call) for call in calls]
        check(
            met,
            f"harness hook `faulty` made no medium that is {fault.value}, or the backend does not use it: "
            f"{', '.join(told) or 'no call was made'}",
        )

    def _prove(self, hook: str) -> None:
        """Once for each harness: what the hook measures grows when something is put into an empty store."""
        proven = _PROVEN.get(self._harness)
        if proven is None:
            proven = _PROVEN.keep(self._harness, set())
        if hook in proven:
            return
        place, key = self._bench.place(), key_named("measured")
        empty = getattr(self._harness, hook)(place.directory)
        store = self._bench.open(place)
        store.put(key, value_of(key, 1, PAGE))
        store.get(key, PAGE)  # which finds it, wherever it still was
        more = getattr(self._harness, hook)(place.directory)
        store.close()
        check(more > empty, f"harness hook `{hook}` sees no value that is put: {empty}, then {more}")
        proven.add(hook)

    def _meets(self, fault: Fault, call: Attempt) -> bool:
        if fault in _DELAYS:
            return call.took_s >= self._harness.stalled_deadline_s / 2
        refused = {Status.FAILED, Status.FULL} if fault is Fault.FULL else {Status.FAILED}
        return bool(refused & set(call.statuses))

    def _paths(self) -> set[str]:
        return {str(path) for path in self._directory.rglob("*")}


def _told(call: Attempt) -> str:
    ended = " and ".join(sorted({status.name for status in call.statuses})) or "is running"
    return f"{ended} after {call.took_s:.3f} s"
