"""The bench a property works on: places for stores, threads that race, and a limit on all of it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lmcache_core.storage.contract import Backend, Capabilities, Resident
from lmcache_core_conformance.core import Core
from lmcache_core_conformance.driver import RecordingHost, Store
from lmcache_core_conformance.figures import Figure
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.preemption import Preemption
from lmcache_core_conformance.values import PAGE
from lmcache_core_conformance.verdicts import NotApplicable, Violation, check

_CAPABILITIES: WeakKeyDictionary[Harness, tuple[Capabilities, bool]] = WeakKeyDictionary()


class Place:
    """Where one store lives: an empty directory of its own, and the options that lead there."""

    def __init__(self, harness: Harness, directory: Path, *, small: bool = False) -> None:
        self.directory = directory
        configure = harness.small_config if small else harness.fresh_config
        self.options: Mapping[str, object] = configure(directory)


class Bench:
    """Everything one property may use; `close` takes it all away again."""

    def __init__(self, harness: Harness, on_figure: Callable[[Figure], None] = lambda figure: None) -> None:
        self.harness = harness
        self._on_figure = on_figure
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-", dir=harness.directory))
        self._opened: list[Store | Core] = []
        self._num_places = 0

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

    def place(self, *, small: bool = False) -> Place:
        """A new, empty place; a small one for a store that evicts by itself at `small_capacity_bytes`."""
        self._num_places += 1
        directory = self.directory / f"store-{self._num_places}"
        directory.mkdir()
        return Place(self.harness, directory, small=small)

    def build(self, place: Place) -> Backend[Any]:
        """The backend of that place, not opened."""
        return self.harness.build(place.options)

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
            narrowed = backend.open(host)
        except BaseException:
            backend.close()
            host.close()
            raise
        store = Store(backend, host, narrowed or backend.capabilities, place.options)
        self._opened.append(store)
        return store

    def open_core(self, place: Place | None = None) -> Core:
        """Opens the backend of `place` (a new one by default) under the core's executor."""
        place = place or self.place()
        core = Core(self.harness, self.build(place), capacity_bytes=self.harness.capacity_bytes)
        self._opened.append(core)
        return core

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
            threading.Thread(target=run, args=(number, worker), daemon=True)
            for number, worker in enumerate(workers)
        ]
        with _frequent_switches():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
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
        """Closes every store, last first, and removes the directory; raises the first error at the end."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for opened in self._opened:
                stack.callback(opened.close)
        self._opened.clear()

    def _found(self) -> tuple[Capabilities, bool]:
        found = _CAPABILITIES.get(self.harness)
        if found is None:
            store = self.open()
            found = (store.capabilities, isinstance(store.backend, Resident))
            store.close()
            _CAPABILITIES[self.harness] = found
        return found


def bounded(work: Callable[[], None], limit_s: float) -> None:
    """Runs `work` on a daemon thread, so that a backend that hangs fails instead of hanging the suite.

    Raises:
        Violation: it had not ended after `limit_s`; the message shows where it stands.
        BaseException: whatever `work` raised.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (handed to the caller below)
            errors.append(error)

    thread = threading.Thread(target=run, name="conformance-property", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)"
        raise Violation(f"still running after {limit_s} s:\n{stack}")
    if errors:
        raise errors[0]


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
