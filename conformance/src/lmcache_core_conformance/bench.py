"""The bench a property works on: places for stores, and threads that race."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from lmcache_core.errors import PluginError
from lmcache_core.storage.checks import checked_capabilities
from lmcache_core.storage.contract import Backend, Capabilities, Resident
from lmcache_core_conformance.certified import check_instance
from lmcache_core_conformance.core import Core
from lmcache_core_conformance.driver import RecordingHost, Store
from lmcache_core_conformance.figures import Figure
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.known import Known
from lmcache_core_conformance.preemption import Preemption
from lmcache_core_conformance.values import PAGE
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, Violation, check
from lmcache_core_conformance.watch import join, named_thread

_CAPABILITIES = Known[tuple[Capabilities, bool]]()
_IN_ORDER = Known[bool]()
"""Those whose backend declares capabilities that make sense."""


class Place:
    """Where one store lives: an empty directory of its own, and the options that lead there."""

    def __init__(self, harness: Harness, directory: Path, *, small: bool = False) -> None:
        self.directory = directory
        configure = harness.small_config if small else harness.fresh_config
        self.options: Mapping[str, object] = configure(directory)


class _Entered:
    """A context of foreign code: left once, whoever does it, and told of no error that it could swallow."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        context.__enter__()
        self._left: list[AbstractContextManager[None]] = [context]

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            self._left.pop().__exit__(None, None, None)  # pop() is atomic under the GIL


class Bench:
    """Everything one property may use; `close` takes it all away again. Thread-safe in this alone."""

    def __init__(
        self,
        harness: Harness,
        on_figure: Callable[[Figure], None] = lambda figure: None,
        backend: type[Backend[Any]] | None = None,
    ) -> None:
        self.harness = harness
        self.backend_class: type[Backend[Any]] = backend or harness.backend
        self._on_figure = on_figure
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-", dir=harness.directory))
        self._lock = threading.Lock()  # guards the two below
        self._opened: list[Store | Core | _Entered] = []
        self._closed = False
        self._num_places = 0
        self._built: list[Backend[Any]] = []

    @property
    def capabilities(self) -> Capabilities:
        """What the backend offers once open; found out once for each harness."""
        return self._found()[0]

    @property
    def is_resident(self) -> bool:
        """Whether the backend implements the `Resident` protocol."""
        return self._found()[1]

    def require(self, capability: str) -> None:
        """Ends the property as not applicable unless the backend offers `capability`.

        A field of `Capabilities`, where `max_in_flight` means more than one call at once; or `Resident`,
        the protocol.
        """
        if capability == "Resident":
            if not self.is_resident:
                raise NotApplicable("the backend does not implement the Resident protocol")
        elif capability == "max_in_flight":
            if self.capabilities.max_in_flight < 2:
                raise NotApplicable("capability max_in_flight is 1")
        elif not getattr(self.capabilities, capability):
            raise NotApplicable(f"capability {capability} is {getattr(self.capabilities, capability)}")

    def check_declared(self) -> None:
        """
        Raises:
            Unproven: the backend declares what makes no sense. Looked at once for each harness.
        """
        if not _IN_ORDER.get(self.harness):
            _in_order(self.build(self.place()).capabilities, "its capabilities")
            _IN_ORDER.keep(self.harness, True)

    def place(self, *, small: bool = False) -> Place:
        """A new, empty place; a small one for a store that evicts by itself at `small_capacity_bytes`."""
        self._num_places += 1
        directory = self.directory / f"store-{self._num_places}"
        directory.mkdir()
        return Place(self.harness, directory, small=small)

    def build(self, place: Place) -> Backend[Any]:
        """The backend of that place, not opened.

        Raises:
            Violation: it is not of just the class that is certified.
        """
        backend = self.harness.build(place.options)
        check_instance(backend, self.backend_class)
        self._built.append(backend)
        return backend

    def check_built(self) -> None:
        """
        Raises:
            Violation: a backend is no longer what `build` found it to be.
        """
        for backend in self._built:
            check_instance(backend, self.backend_class)

    def host(self, backend: Backend[Any], *, capacity_bytes: int | None = None) -> RecordingHost:
        return RecordingHost(
            capacity_bytes=capacity_bytes or self.harness.capacity_bytes,
            deadline_s=self.harness.deadline_s,
            max_in_flight=backend.capabilities.max_in_flight,
        )

    def open(self, place: Place | None = None, *, capacity_bytes: int | None = None) -> Store:
        """Opens the backend of `place` (a new one by default); closed at the end at the latest."""
        place = place or self.place()
        backend = self.build(place)
        host = self.host(backend, capacity_bytes=capacity_bytes)
        try:
            opened = backend.open(host)
            capabilities = _in_order(backend.capabilities if opened is None else opened, "what is in force")
        except BaseException:
            backend.close()
            host.close()
            raise
        store = Store(backend, host, capabilities, place.options)
        self._keep(store)
        return store

    def open_core(self, place: Place | None = None) -> Core:
        """Opens the backend of `place` (a new one by default) under the core's executor."""
        self._found()  # what it declares is in order, or the core would refuse it
        place = place or self.place()
        core = Core(self.harness, self.build(place), capacity_bytes=self.harness.capacity_bytes)
        self._keep(core)
        return core

    @contextlib.contextmanager
    def inside(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enters a harness's context, and leaves it: at the latest when the bench is closed."""
        entered = _Entered(context)
        self._keep(entered)
        try:
            yield
        finally:
            entered.close()

    def require_medium(self, *media: str, why: str) -> None:
        """Ends the property as not applicable unless the backend's medium is one of `media`."""
        if self.capabilities.medium not in media:
            raise NotApplicable(f"capability medium is {self.capabilities.medium}: {why}")

    def fit(self, pages: int) -> int:
        """`pages` in bytes, or the backend's maximum where that is less."""
        maximum = self.capabilities.max_value_bytes
        return pages * PAGE if maximum is None else min(pages * PAGE, maximum // PAGE * PAGE)

    def race(self, store: Store, *workers: Callable[[], None], seed: int = 0) -> None:
        """Runs the workers at once, each on its own thread, stopping them inside the backend by `seed`.

        Raises:
            BaseException: the first one that a worker raised, after all have ended.
        """
        barrier, preemption = threading.Barrier(len(workers)), Preemption(len(workers), seed)
        errors: list[BaseException] = []
        store.after_call = preemption.completed

        def run(number: int, worker: Callable[[], None]) -> None:
            try:
                barrier.wait()
                with preemption.thread(number):
                    worker()
            except BaseException as error:  # noqa: BLE001 (handed to the caller below)
                errors.append(error)

        threads = [
            named_thread(f"race-{number}", partial(run, number, worker))
            for number, worker in enumerate(workers)
        ]
        with _frequent_switches():
            for thread in threads:
                thread.start()
            for thread in threads:
                join(thread)
        store.after_call = None
        if errors:
            raise errors[0]

    def report(self, figure: Figure) -> None:
        """Hands on a figure.

        Raises:
            Violation: it is below its floor, and the harness enforces floors.
        """
        self._on_figure(figure)
        check(not (self.harness.enforce_performance and figure.below_floor), str(figure))

    def close(self) -> None:
        """Closes every store, last first, and removes the directory; raises the first error at the end.

        Idempotent: a second call does nothing.
        """
        with self._lock:
            opened, self._opened = self._opened, []
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for one in opened:
                stack.callback(one.close)

    def abandon(self) -> None:
        """Takes away what a property that hangs or was interrupted left open, as far as that goes."""
        if self._closed and not self.directory.exists():
            return

        def close() -> None:
            with contextlib.suppress(BaseException):  # there is a worse thing to tell
                self.close()

        closing = named_thread("closing", close)
        closing.start()
        closing.join(self.harness.slack_s)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _keep(self, opened: Store | Core | _Entered) -> None:
        """
        Raises:
            Violation: the bench was closed meanwhile; then so is `opened`.
        """
        with self._lock:
            if not self._closed:
                self._opened.append(opened)
                return
        opened.close()
        raise Violation("something was opened after its property was given up")

    def _found(self) -> tuple[Capabilities, bool]:
        found = _CAPABILITIES.get(self.harness)
        if found is None:
            store = self.open()
            found = (store.capabilities, isinstance(store.backend, Resident))
            store.close()
            _CAPABILITIES.keep(self.harness, found)
        return found


def _in_order(offers: object, what: str) -> Capabilities:
    """
    Raises:
        Unproven: they make no sense; a property of its own says so, and no other can be shown.
    """
    try:
        return checked_capabilities(offers, what)
    except PluginError as error:
        raise Unproven(f"nothing can be shown with ill-declared capabilities: {error}") from error


def uneven_cuts(nbytes: int, pieces: int) -> Sequence[int]:
    """Lengths of about `pieces` page-aligned, deliberately uneven pieces that add up to `nbytes`."""
    pages = nbytes // PAGE
    lengths: list[int] = []
    while pages > 0 and len(lengths) < pieces - 1:
        take = min(pages, 1 + len(lengths) % 3)
        lengths.append(take * PAGE)
        pages -= take
    if pages:
        lengths.append(pages * PAGE)
    return lengths


def spread(count: int, limit: int) -> list[int]:
    """Up to `limit` of the numbers 1 to `count`, evenly spread, the first and the last among them."""
    if count <= limit or limit < 2:
        return list(range(1, count + 1))[: max(limit, 1)]
    return sorted({1 + round(n * (count - 1) / (limit - 1)) for n in range(limit)})


@contextlib.contextmanager
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
