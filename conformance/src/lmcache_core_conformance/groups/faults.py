"""Faults: what is wrong with a store is said as it is, at once, and passes when it passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from lmcache_core.errors import ConfigError, LMCacheError, NotSupported, PermissionDenied
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Lease
from lmcache_core.storage.contract import Outcome, Status
from lmcache_core_conformance.behind import Fault
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.driver import RecordingCall, Store
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.system_calls import CHANGES, READS, SystemCalls
from lmcache_core_conformance.timing import in_time
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, check

T = TypeVar("T")
_NO_SERVER = "there is no server and no connection"
_TRIES = 3


class Faults(Group):
    group = "faults"

    def test_a_dead_server_is_a_failure_and_never_a_miss(self) -> None:
        """A miss says "compute it and store it": a dead node makes the whole fleet do so."""
        self.bench.require_medium("network", why=_NO_SERVER)
        store, place, key, value = self._stored()
        store.stat(key)  # an answer to remember, which is none any more once the server is gone
        with Reach(self.bench, place).faulty(Fault.KILLED, store):
            self._fails_retryably("get", lambda: store.get(key, len(value)).outcome)
            self._fails_retryably("put", lambda: store.put(key_named("new"), value))
            self._fails_retryably("get of an absent key", lambda: store.get(key_named("x"), PAGE).outcome)
            if self.bench.capabilities.shared:
                self._fails_retryably("stat", lambda: store.stat(key))
            if self.bench.capabilities.delete:
                self._fails_retryably("delete", lambda: store.delete(key))
            if self.bench.capabilities.scan:
                listed = self._in_slack("scan", lambda: _listed(store))
                check(listed is None or key in listed, "a scan of a dead server is one of an empty store")

    def test_a_server_that_comes_back_is_used_again(self) -> None:
        """Servers restart: a client that keeps its dead connection is down until the engine restarts, too."""
        self.bench.require_medium("network", why=_NO_SERVER)
        store, place, key, value = self._stored()
        with Reach(self.bench, place).faulty(Fault.KILLED, store):
            self._in_slack("get", lambda: store.get(key, len(value)))
        self._recovers(store, key, value)

    def test_a_connection_reset_inside_a_value_is_a_failure_that_passes(self) -> None:
        """Half a value is no value: whatever was received, the item failed, and the next one is whole."""
        self.bench.require_medium("network", why=_NO_SERVER)
        store, place, key, value = self._stored(16)
        with Reach(self.bench, place).faulty(Fault.RESET, store):
            self._fails_retryably("get", lambda: store.get(key, len(value)).outcome)
            new = value_of(key, 2, len(value))
            outcome = self._in_slack("put", lambda: store.put(key, new))
            check(outcome.status is Status.FAILED, f"put over a reset connection: {outcome.status.name}")
        store.get(key, PAGE)  # finds out that the connection is broken, where it was kept
        got = store.get(key, len(value))
        whole = got.value in (value, new)
        check(whole, f"after a put that was cut off: {got.status.name}, neither old nor new")
        self._recovers(store, key, value)

    def test_a_half_closed_connection_is_noticed_at_once(self) -> None:
        """The peer's end of file is an answer: who reads on spins, or waits for the deadline each time."""
        self.bench.require_medium("network", why=_NO_SERVER)
        store, place, key, value = self._stored(16)
        with Reach(self.bench, place).faulty(Fault.HALF_CLOSED, store):
            self._fails_retryably("get", lambda: store.get(key, len(value)).outcome)
        self._recovers(store, key, value)

    def test_a_full_medium_is_full_and_loses_nothing(self) -> None:
        """Disks fill although our own count says there is room: that must cost new values, not old ones."""
        store, place, key, value = self._stored()
        new = key_named("no room")
        with self._no_room(store, place):
            for other, what in ((new, "a new value"), (key, "an overwrite")):
                put = partial(store.put, other, value_of(other, 2, self.bench.fit(2)))
                outcome = self._in_slack(f"put of {what}", put)
                check(outcome.status is Status.FULL, f"put of {what} without room: {outcome.status.name}")
            self.holds(store, key, value, "a value while the medium is full")
            self.lacks(store, new, self.bench.fit(2), "a value that found no room")
        self._recovers(store, key, value)

    def test_a_read_only_medium_refuses_writes_and_serves_reads(self) -> None:
        """Rights change under a running system: what can still be read must be, and the rest be named."""
        self.bench.require_medium("network", "file", why="memory has no access rules")
        store, place, key, value = self._stored()
        with Reach(self.bench, place).faulty(Fault.READ_ONLY, store):
            self.refused(self._in_slack("put", lambda: store.put(key, value_of(key, 2, PAGE))), "put")
            if self.bench.capabilities.delete:
                self.refused(self._in_slack("delete", lambda: store.delete(key)), "delete")
            self.holds(store, key, value, "a value of a store that became read-only")
        self._recovers(store, key, value)

    def test_a_call_that_moves_less_than_asked_cuts_no_value(self) -> None:
        """The system may move half, and says so: who doesn't look stores, or serves, the start of a value."""
        self.bench.require_medium("file", why="no system call moves its values")
        store, place, key, _ = self._stored()
        value, calls = value_of(key, 2, self.bench.fit(16)), SystemCalls(place.directory)
        with self.bench.inside(calls.moving_half()):
            outcome = store.put(key, value)
        if outcome.status is Status.OK:
            self.holds(store, key, value, "a value whose writes moved half of what was asked")
        else:
            self._not_a_miss(outcome, "put while writes move half of what is asked")
            self.put(store, key, value)
        with self.bench.inside(calls.moving_half()):
            got = store.get(key, len(value))
        self._met(calls)
        if got.status is Status.OK:
            self.check_value(got, value, "a value while reads move half of what is asked")
        else:
            self._not_a_miss(got.outcome, "get while reads move half of what is asked")

    def test_a_read_that_fails_is_a_failure_and_never_a_miss(self) -> None:
        """A bad disk that is told as absent values stays in use, and everything is computed again."""
        self.bench.require_medium("file", why="no system call reads its values")
        store, place, key, value = self._stored()
        calls = SystemCalls(place.directory)
        looks: dict[str, Callable[[], Outcome]] = {
            "get": lambda: store.get(key, len(value)).outcome,
            "stat": lambda: store.stat(key),
        }
        for what, look in looks.items():
            before = calls.met
            with self.bench.inside(calls.failing(READS)):
                outcome = look()
            failed = calls.met == before or outcome.status is Status.FAILED
            check(failed, f"{what} whose system call failed with EIO: {outcome.status.name}, due is FAILED")
        self._met(calls)
        after = store.get(key, len(value))
        check(after.status is not Status.OK or after.value == value, "a get after a failed one is wrong")

    def test_a_put_that_fails_is_not_told_as_done(self) -> None:
        """Writes that fail quietly while the count of what is stored rises are a cache that never hits."""
        self.bench.require_medium("file", why="no system call writes its values")
        store, place, key, value = self._stored()
        new, calls = value_of(key, 2, len(value)), SystemCalls(place.directory)
        with self.bench.inside(calls.failing(CHANGES)):
            outcome = store.put(key, new)
        self._met(calls)
        if outcome.status is Status.OK:
            self.holds(store, key, new, "a value whose put ended OK although a system call failed with EIO")
        else:
            self._not_a_miss(outcome, "put whose system call failed with EIO")
            got = store.get(key, len(value))
            whole = got.status is not Status.OK or got.value in (value, new)
            check(whole, "a get after a put that failed is OK, with neither the old value nor the new one")

    @needs("delete")
    def test_a_delete_that_fails_is_not_told_as_done(self) -> None:
        """A tenant's data is said to be gone, its room is given away, and the next start brings it back."""
        self.bench.require_medium("file", why="no system call removes its values")
        store, place, key, value = self._stored()
        calls = SystemCalls(place.directory)
        with self.bench.inside(calls.failing(CHANGES)):
            outcome = store.delete(key)
        self._met(calls)
        if outcome.status is Status.FAILED:
            return
        told = f"a delete whose system call failed with EIO ended {outcome.status.name}"
        check(store.get(key, len(value)).status is Status.MISS, f"{told}, and the value is there")
        if self.bench.capabilities.persistent:
            store.close()
            again = self.bench.open(place).get(key, len(value))
            check(again.status is Status.MISS, f"{told}, and the value is there when it is opened again")

    def test_opening_without_the_right_to_write_says_so(self) -> None:
        """A tier that opens and then refuses every store reports healthy while nothing is ever cached."""
        self.bench.require_medium("network", "file", why="memory has no access rules")
        place = self.bench.place()
        self.bench.open(place).close()
        read_only = self.bench.harness.faulty(place.directory, Fault.READ_ONLY)
        with self.bench.inside(read_only):  # met by opening, or fails
            error = self._open_error(place)
        check(error is not None, "a store that refuses every write was opened")
        typed = isinstance(error, PermissionDenied | ConfigError)
        check(typed, f"opening a read-only store gave {error!r}, due is PermissionDenied or ConfigError")
        key = key_named("after")
        store = self.bench.open(place)
        self.put(store, key, value_of(key, 1, PAGE))

    @needs("authenticated")
    def test_wrong_credentials_are_refused_when_opening(self) -> None:
        """A wrong password found out at the first store, hours later, is a cache that never was there."""
        place = self.bench.place()
        wrong = self.bench.harness.wrong_credentials(place.directory)
        backend = self.bench.harness.build(wrong)
        host = self.bench.host(backend)
        try:
            error = _error_of(lambda: backend.open(host))
        finally:
            backend.close()
            host.close()
        check(error is not None, "a backend was opened with wrong credentials")
        refused = isinstance(error, PermissionDenied)
        check(refused, f"wrong credentials gave {error!r}, due is PermissionDenied")

    @needs("authenticated")
    def test_rights_narrower_than_declared_are_told_when_opening(self) -> None:
        """An account that may not delete is found out when the tier is full, unless open says so."""
        place = self.bench.place()
        narrower = self.bench.harness.narrower_credentials(place.directory)
        backend = self.bench.harness.build(narrower)
        host = self.bench.host(backend)
        opened = None
        try:
            error = _error_of(lambda: backend.open(host))
            if error is not None:
                check(isinstance(error, PermissionDenied), f"narrower rights gave {error!r} when opening")
                return
            backend.close()
            backend = self.bench.harness.build(narrower)
            opened = backend.open(host) or backend.capabilities
            store = Store(backend, host, opened, narrower)
            key = key_named("narrower")
            self.put(store, key, value_of(key, 1, PAGE))
            if opened.scan:
                check(_error_of(lambda: store.scan()) is None, "scan is in force after open, and is refused")
            if opened.delete:
                deleted = store.delete(key)
                check(deleted.status is Status.OK, f"delete is in force after open: {deleted.error!r}")
            else:
                call = RecordingCall(1, self.bench.harness.deadline_s)
                refusal = _error_of(lambda: backend.delete_many([key], call))
                seen = refusal or next((o.error for o in call.outcomes), None)
                typed = isinstance(seen, PermissionDenied | NotSupported)
                check(typed, f"delete was narrowed away and gives {seen!r}")
            lost = [
                n for n, value in asdict(self.bench.capabilities).items() if value and not getattr(opened, n)
            ]
            check(lost, "harness hook `narrower_credentials` gives rights to all that is declared")
        finally:
            backend.close()
            host.close()

    # -- what these properties share -------------------------------------------------------------

    def refused(self, outcome: Outcome, what: str) -> None:
        """Checks that an access rule was named, and that it is not one to try again."""
        denied = outcome.status is Status.FAILED and isinstance(outcome.error, PermissionDenied)
        check(denied, f"{what} on a read-only medium: {outcome.status.name} ({outcome.error!r})")
        check(
            outcome.error is not None and not outcome.error.retryable, f"a refused {what} is called retryable"
        )

    @contextmanager
    def _no_room(self, store: Store, place: Place) -> Iterator[None]:
        """While inside, the medium has no room; of a memory tier, the pool has none."""
        if self.bench.capabilities.medium != "memory":
            with Reach(self.bench, place).faulty(Fault.FULL, store):
                yield
            return
        pool = store.host.pool_if_used
        if pool is None:
            raise NotApplicable("capability medium is memory, and the backend takes none of the pool's")
        taken: list[Lease] = []
        try:
            for nbytes in (1 << 20, 16 * PAGE, 2 * PAGE, PAGE):
                while (lease := pool.try_allocate(nbytes, owner="conformance")) is not None:
                    taken.append(lease)
            yield
        finally:
            for lease in taken:
                lease.release()

    def _stored(self, pages: int = 2) -> tuple[Store, Place, StorageKey, bytes]:
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("stored before")
        value = value_of(key, 1, self.bench.fit(pages))
        self.put(store, key, value)
        return store, place, key, value

    def _in_slack(self, what: str, call: Callable[[], T]) -> T:
        return in_time(what, call, self.bench.harness.slack_s)

    @staticmethod
    def _met(calls: SystemCalls) -> None:
        """
        Raises:
            NotApplicable: the backend came to none of them.
        """
        if not calls.met:
            raise NotApplicable("capability medium is file, and none of Python's os functions moves a value")

    @staticmethod
    def _not_a_miss(outcome: Outcome, what: str) -> None:
        told = outcome.status in (Status.FAILED, Status.FULL)
        check(told, f"{what}: {outcome.status.name}, due is OK or FAILED")

    def _fails_retryably(self, what: str, call: Callable[[], Outcome]) -> None:
        outcome = self._in_slack(what, call)
        check(outcome.status is Status.FAILED, f"{what}: {outcome.status.name}, due is FAILED")
        retryable = outcome.error is not None and outcome.error.retryable
        check(retryable, f"{what} failed with {outcome.error!r}, which is not retryable")

    def _recovers(self, store: Store, key: StorageKey, value: bytes) -> None:
        """Checks that puts and gets work again, after a few tries at most, without opening anew."""
        seen: list[str] = []
        for _ in range(_TRIES):
            outcome = self._in_slack("put after the fault", lambda: store.put(key, value))
            if outcome.status is Status.OK:
                self.holds(store, key, value, "a value put after the fault had passed")
                return
            seen.append(f"{outcome.status.name} ({outcome.error})")
        check(False, f"after the fault had passed, puts ended {'; '.join(seen)}")

    def _open_error(self, place: Place) -> Exception | None:
        backend = self.bench.build(place)
        host = self.bench.host(backend)
        try:
            return _error_of(lambda: backend.open(host))
        finally:
            backend.close()
            host.close()


def _listed(store: Store) -> set[StorageKey] | None:
    """What a scan lists; None where it fails."""
    try:
        return {entry.key for entry in store.scan()}
    except LMCacheError:
        return None


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except LMCacheError as error:
        return error.with_traceback(None)
    return None
