"""A whole scan as one job: all pages, within one deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lmcache_core.errors import BackendError, DeadlineExceeded
from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import KEY_PATTERN, StorageKey
from lmcache_core.storage.call import Job, Operation, Priority
from lmcache_core.storage.contract import Call, Entry, Outcome, Page, Status

PAGE_ENTRIES = 4096


class ScanJob(Job):
    """Collects the entries of all pages; `result` waits for them."""

    operation = Operation.SCAN
    priority = Priority.PREFETCH
    num_items = 1
    nbytes = 0

    def __init__(
        self, scan: Callable[[Call, str, str | None, int], Page], prefix: str, *, deadline: float
    ) -> None:
        self.deadline = deadline
        self._scan = scan
        self._prefix = prefix
        self._entries: list[Entry] = []
        self._outcome: Outcome | None = None
        self._settled = threading.Event()

    def prepare(self) -> Sequence[StorageKey]:
        return [StorageKey(self._prefix)]

    def read_pages(self, call: Call) -> None:
        """Runs the scan; entries that can't be meant are an error, not data."""
        entries: list[Entry] = []
        cursor: str | None = None
        while True:
            call.remaining()
            page = self._scan(call, self._prefix, cursor, PAGE_ENTRIES)
            for entry in page.entries:
                self._check(entry)
                entries.append(entry)
            if page.cursor is None:
                break
            if page.cursor == cursor:
                raise BackendError("the scan doesn't advance: the same cursor came twice")
            cursor = page.cursor
        self._entries = entries
        call.done(0, Outcome(status=Status.OK))

    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        self._outcome = outcome
        self._settled.set()

    def landed(self, index: int, outcome: Outcome) -> None:
        raise AssertionError("a scan writes nothing")

    def finished(self) -> None:
        """Nothing to release."""

    def result(self, timeout_s: float) -> list[Entry]:
        """All entries. Blocks for at most `timeout_s`.

        Raises:
            BackendError: the scan failed, was refused, or did not end in time.
        """
        self._settled.wait(max(timeout_s, 0.0))
        outcome = self._outcome
        if outcome is None:
            raise DeadlineExceeded("the scan did not end in time", op=self.operation.value)
        if outcome.status is not Status.OK:
            raise outcome.error or BackendError("the scan failed", op=self.operation.value)
        return self._entries

    def _check(self, entry: Entry) -> None:
        if not isinstance(entry, Entry):
            raise BackendError(f"the scan returned a {type(entry).__name__}")
        if not _is_key(entry.key):
            raise BackendError("the scan returned a key that is none")
        if not entry.key.startswith(self._prefix):
            raise BackendError(f"the scan for {self._prefix!r} returned {entry.key}")
        for name, value, fine in (
            ("nbytes", entry.nbytes, _is_number(entry.nbytes)),
            ("stored", entry.stored, entry.stored is None or _is_number(entry.stored)),
            ("token", entry.token, entry.token is None or _is_number(entry.token)),
            ("parent", entry.parent, entry.parent is None or _is_key(entry.parent)),
        ):
            if not fine:
                raise BackendError(f"the scan says that {name} is {value!r}", key=entry.key)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and KEY_PATTERN.fullmatch(value) is not None


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0
