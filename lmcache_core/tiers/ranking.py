"""All that follows from which copies a tier holds: bytes, family, recency, and who may leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold


class Resident:
    """One copy of one frame in one tier. Owned by its index; fields change only under its lock."""

    __slots__ = (
        "children",
        "header",
        "hold",
        "key",
        "last_use",
        "nbytes",
        "parent",
        "place",
        "reserved",
        "stored",
        "token",
    )

    def __init__(
        self,
        key: StorageKey,
        nbytes: int,
        stored: int,
        *,
        parent: StorageKey | None = None,
        token: int | None = None,
        hold: Hold | None = None,
        header: FrameHeader | None = None,
    ) -> None:
        self.key = key
        self.nbytes = nbytes  # the frame's length
        self.stored = stored  # what the tier charges for it
        self.parent = parent
        self.token = token
        self.hold = hold  # memory tiers: the pool's evictable reference
        self.header = header  # memory tiers: kept here, since unsealed frames carry none
        self.place: Literal["outside", "here", "leaving"] = "outside"
        self.reserved = 0  # what is set aside for it before it is here
        self.children = 0
        self.last_use = 0

    @property
    def order_class(self) -> int:
        return self.stored if self.hold is None else self.hold.slot_nbytes


class Ranking:
    """Derived from `here`, the visible copies by key, and kept up to date with each that comes or goes.

    Recency is kept per size class; a path is touched deepest first, so ancestors are newer than what hangs
    on them. `held` says which copies must stay. Not thread-safe: the index's lock guards it.
    """

    def __init__(self, here: Mapping[StorageKey, Resident], held: Callable[[Resident], bool]) -> None:
        self.used_bytes = 0
        self.tick = 0
        self._here = here
        self._held = held
        self._orders: dict[int, OrderedDict[StorageKey, Resident]] = {}
        self._children: dict[StorageKey, set[StorageKey]] = {}  # also of parents that aren't here

    # -- coming and going ------------------------------------------------------------------------

    def add(self, entry: Resident) -> None:
        """`entry` is here now, the newest."""
        entry.children = len(self._children.get(entry.key, ()))
        self._orders.setdefault(entry.order_class, OrderedDict())[entry.key] = entry
        self.used_bytes += entry.stored
        if entry.parent is not None:
            siblings = self._children.setdefault(entry.parent, set())
            siblings.add(entry.key)
            parent = self._here.get(entry.parent)
            if parent is not None:
                parent.children = len(siblings)
        self.use(entry)

    def add_oldest(self, entry: Resident) -> None:
        """`entry`, the last one dropped, is back where it was."""
        last_use = entry.last_use
        self.add(entry)
        entry.last_use = last_use
        self._orders[entry.order_class].move_to_end(entry.key, last=False)

    def drop(self, entry: Resident) -> None:
        """`entry` is here no more."""
        order = self._orders[entry.order_class]
        del order[entry.key]
        if not order:
            del self._orders[entry.order_class]
        self.used_bytes -= entry.stored
        if entry.parent is not None:
            siblings = self._children[entry.parent]
            siblings.discard(entry.key)
            parent = self._here.get(entry.parent)
            if parent is not None:
                parent.children = len(siblings)
            if not siblings:
                del self._children[entry.parent]

    def use(self, entry: Resident) -> None:
        self.tick += 1
        entry.last_use = self.tick
        self._orders[entry.order_class].move_to_end(entry.key)
        if entry.hold is not None:
            entry.hold.touch(self.tick)

    def recount(self) -> None:
        """Derives everything anew: after Ctrl-C, which may have come in the middle of a change."""
        entries = sorted(self._here.values(), key=lambda entry: entry.last_use)
        self.used_bytes = sum(entry.stored for entry in entries)
        self._orders, self._children = {}, {}
        for entry in entries:
            self._orders.setdefault(entry.order_class, OrderedDict())[entry.key] = entry
            if entry.parent is not None:
                self._children.setdefault(entry.parent, set()).add(entry.key)
        for entry in entries:
            entry.children = len(self._children.get(entry.key, ()))

    # -- who leaves ------------------------------------------------------------------------------

    def coldest(self) -> Resident | None:
        """The coldest copy that has no children here and may leave."""
        coldest: Resident | None = None
        for order in self._orders.values():
            for entry in order.values():
                if coldest is not None and entry.last_use >= coldest.last_use:
                    break
                if entry.children == 0 and not self._held(entry):
                    coldest = entry
                    break
        return coldest

    def coldest_family(self, order_class: int) -> list[Resident]:
        """The coldest copy of a size class that can leave with all that hangs on it, and those: deepest
        first. Empty: none can.

        Looks at each copy once, whatever is held: what one look finds held keeps everything above it.
        """
        kept: set[StorageKey] = set()
        for entry in self._orders.get(order_class, {}).values():
            if entry.key in kept or self._held(entry):
                continue
            family = self.family([entry.key])
            held = [member for member in family if self._held(member)]
            if not held:
                return family
            for member in held:
                above: Resident | None = member
                while above is not None and above.key not in kept:
                    kept.add(above.key)
                    above = None if above.parent is None else self._here.get(above.parent)
        return []

    def family(self, keys: Sequence[StorageKey]) -> list[Resident]:
        """These copies and everything that hangs on them here, deepest first."""
        path = list(dict.fromkeys(keys))
        seen = set(path)
        for above in path:  # grows while it is walked: breadth first
            below = [key for key in self._children.get(above, ()) if key not in seen]
            seen.update(below)
            path.extend(below)
        return [entry for key in reversed(path) if (entry := self._here.get(key)) is not None]


def oldest_first(entries: Iterable[Resident]) -> list[Resident]:
    """Copies in the order in which a tier kept them, made such that ancestors come after descendants."""
    rows = list(entries)
    position = {entry.key: i for i, entry in enumerate(rows)}
    rank = list(range(len(rows)))
    for i in range(len(rows) - 1, -1, -1):
        parent = rows[i].parent
        above = position.get(parent) if parent is not None else None
        if above is not None and above < i:
            rank[above] = max(rank[above], rank[i])
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: (rank[i], -i))]
