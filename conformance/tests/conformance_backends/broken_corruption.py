"""Broken in what they do about damage, full media and foreign things."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance_backends.catalogue import ANYTHING, DAMAGE, RACES, breaks
from conformance_backends.files import FileBackend
from lmcache_core.errors import BackendError, BackendUnavailable
from lmcache_core.identity.keys import KEY_PATTERN, StorageKey
from lmcache_core.storage.contract import Call, Item, Outcome, Status


class FallsBackToTheOldCopy(FileBackend):
    """Keeps the copy that was replaced, and serves it when the newer one looks wrong to it."""

    looks_wrong: Callable[[StorageKey, bytes, bytes], bool]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.old: dict[str, bytes] = {}
        self.newest: dict[str, bytes] = {}

    def store(self, key: StorageKey, value: bytes) -> None:
        super().store(key, value)
        if key in self.newest:
            self.old[key] = self.newest[key]
        self.newest[key] = value

    def remove(self, key: StorageKey) -> None:
        super().remove(key)
        self.old.pop(key, None)
        self.newest.pop(key, None)

    def read(self, key: StorageKey) -> bytes | None:
        value = super().read(key)
        if value is not None and key in self.old and self.looks_wrong(key, value, self.newest[key]):
            return self.old[key]
        return value


@breaks("a_flipped_bit_is_never_served", also=(*DAMAGE, *RACES))
class ServesTheOldCopyWhenBitsDiffer(FallsBackToTheOldCopy):
    def looks_wrong(self, key: StorageKey, value: bytes, newest: bytes) -> bool:
        return len(value) == len(newest) and value != newest


@breaks("a_truncated_or_grown_value_is_never_served", also=RACES)
class ServesTheOldCopyWhenTheLengthDiffers(FallsBackToTheOldCopy):
    def looks_wrong(self, key: StorageKey, value: bytes, newest: bytes) -> bool:
        return len(value) != len(newest)


@breaks("another_value_in_its_place_is_never_served", also=RACES)
class ServesTheOldCopyWhenNothingIsRight(FallsBackToTheOldCopy):
    def looks_wrong(self, key: StorageKey, value: bytes, newest: bytes) -> bool:
        return len(value) == len(newest) and value[:8] == bytes(8)


@breaks("what_lies_in_the_medium_is_what_was_put")
class StoresItsBytesInverted(FileBackend):
    """Put and get agree with each other, and with no other program."""

    _inverted = bytes(255 - byte for byte in range(256))

    def store(self, key: StorageKey, value: bytes) -> None:
        super().store(key, value.translate(self._inverted))

    def read(self, key: StorageKey) -> bytes | None:
        value = super().read(key)
        return None if value is None else value.translate(self._inverted)


@breaks("one_damaged_value_costs_only_itself", also=RACES)
class FailsTheBatchForOneShortFile(FileBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        short = [item for item in items if self.is_short(item.key)]
        if short and len(items) > 1:
            raise BackendError(f"{short[0].key} is damaged")
        super().get_many(items, call)

    def is_short(self, key: StorageKey) -> bool:
        path = self.path / key
        return path.exists() and path.stat().st_size != self.lengths.get(key)


@breaks("a_damaged_value_is_replaced_by_the_next_put", also=ANYTHING)
class SkipsWhatItAlreadyHas(FileBackend):
    """What has a name of its content is never written twice, damaged or not."""

    def store(self, key: StorageKey, value: bytes) -> None:
        if key not in self.lengths:
            super().store(key, value)


@breaks("damage_is_not_an_outage", also=RACES)
class CallsAShortFileAnOutage(FileBackend):
    def get_one(self, item: Item) -> Outcome:
        path = self.path / item.key
        if path.exists() and path.stat().st_size != self.lengths.get(item.key):
            error = BackendUnavailable(f"{item.key} can't be read")
            return Outcome(status=Status.FAILED, error=error)
        return super().get_one(item)


@breaks("what_belongs_to_others_is_neither_listed_nor_touched")
class SweepsWhatIsNotItsOwn(FileBackend):
    def sweep(self) -> None:
        super().sweep()
        for path in self.path.iterdir():
            if path.is_file() and not KEY_PATTERN.fullmatch(path.name):
                path.unlink()


@breaks(
    "what_belongs_to_others_is_neither_listed_nor_touched",
    also=("a_store_of_many_values_holds_counts_and_lists_all_of_them",),
)
class CountsWhatIsNotItsOwn(FileBackend):
    def index(self) -> None:
        super().index()
        for path in self.path.iterdir():
            if path.is_file():
                self.lengths[path.name] = path.stat().st_size


@breaks("a_full_medium_is_full_and_loses_nothing")
class CallsNoRoomAFailure(FileBackend):
    def refusal(self, error: OSError) -> Outcome:
        if error.errno != errno.ENOSPC:
            return super().refusal(error)
        return Outcome(status=Status.FAILED, error=BackendError(str(error)))


@breaks("a_full_medium_is_full_and_loses_nothing")
class MakesRoomByRemovingTheOldValue(FileBackend):
    def write(self, path: Path, value: bytes) -> None:
        try:
            super().write(path, value)
        except OSError as error:
            oldest = next(iter(self.lengths), None)
            if oldest is not None and error.errno == errno.ENOSPC:
                (self.path / oldest).unlink(missing_ok=True)
            raise


@breaks("kill_9_while_room_is_made_leaves_each_value_whole_or_absent", also=ANYTHING)
class RecyclesFilesBeforeItForgetsThem(FileBackend):
    """A deleted value's file keeps its name until the next value has been written into it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.free: list[Path] = []

    def remove(self, key: StorageKey) -> None:
        self.free.append(self.path / key)

    def store(self, key: StorageKey, value: bytes) -> None:
        path = self.path / key
        if path in self.free:
            self.free.remove(path)
        if not self.free:
            super().store(key, value)
            return
        recycled = self.free.pop()
        self.write(recycled, value)
        os.truncate(recycled, len(value))
        recycled.rename(path)

    def read(self, key: StorageKey) -> bytes | None:
        return super().read(key) if key in self.lengths else None

    def close(self) -> None:
        for path in self.free:
            path.unlink(missing_ok=True)
        self.free.clear()
        super().close()
