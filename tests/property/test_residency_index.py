"""The residency index against a plain model of it: bytes, families, recency, the numbered stream."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_core.events import ChunkAdmitted, ChunkEvicted, Event, EventBus
from lmcache_core.identity.keys import StorageKey
from lmcache_core.tiers.index import ResidencyIndex, Resident

CAPACITY = 40
PATHS = [[StorageKey(f"c-{root}-{depth}") for depth in range(5)] for root in range(3)]
KEYS = [key for path in PATHS for key in path]
PARENT = {path[i]: path[i - 1] if i else None for path in PATHS for i in range(5)}


class IndexMachine(RuleBasedStateMachine):
    """Drives an index as a tier does, keeping its own books."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.pins: set[StorageKey] = set()
        bus = EventBus()
        bus.subscribe(self)
        self.index = ResidencyIndex("t", CAPACITY, pinned=lambda key: key in self.pins, events=bus)
        self.held: dict[StorageKey, int] = {}
        self.age: list[StorageKey] = []  # coldest first
        self.leaving: list[Resident] = []
        self.begun: list[tuple[StorageKey, int]] = []
        self.arriving: list[Resident] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, 9))
    def take_room(self, key: StorageKey, nbytes: int) -> None:
        copy, victims = Resident(key, nbytes, nbytes, parent=PARENT[key]), list[Resident]()
        if self.index.take_room(copy, victims):
            self.arriving.append(copy)
        for victim in victims:
            self._leaves(victim)
            self.index.gone(victim)

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(1, 9))
    def reserve(self, key: StorageKey, nbytes: int) -> None:
        before = dict(self.held)
        victims = self.index.reserve(nbytes)
        if victims is None:
            assert before == self.held
            return
        for victim in victims:
            self._leaves(victim)
            self.leaving.append(victim)
        if self.index.begin(nbytes):
            self.begun.append((key, nbytes))
        else:
            self.index.unreserve(nbytes, begun=False)

    @rule()
    def recount(self) -> None:
        """What Ctrl-C in the middle of a change brings about; the invariants say that it changes nothing."""
        self.index._ranking.recount()

    def _leaves(self, victim: Resident) -> None:
        key = victim.key
        assert key in self.held
        assert key not in self.pins
        assert not any(PARENT[other] == key for other in self.held), "a parent left before its child"
        free = [
            other
            for other in self.age
            if other not in self.pins and not any(PARENT[child] == other for child in self.held)
        ]
        assert key == free[0], "not the coldest"
        del self.held[key]
        self.age.remove(key)

    @precondition(lambda self: self.leaving)
    @rule(back=st.booleans())
    def end_of_a_victim(self, back: bool) -> None:
        victim = self.leaving.pop()
        if not back:
            self.index.gone(victim)
            return
        self.index.kept(victim)
        if victim.key not in self.held:
            self.held[victim.key] = victim.stored
            self._used(victim.key)

    @precondition(lambda self: self.begun)
    @rule(fails=st.booleans())
    def end_of_a_put(self, fails: bool) -> None:
        key, nbytes = self.begun.pop()
        if fails:
            self.index.unreserve(nbytes, begun=True)
            return
        self.index.admit(Resident(key, nbytes, nbytes, parent=PARENT[key]), reserved=nbytes)
        self.held[key] = nbytes
        self._used(key)

    @precondition(lambda self: self.arriving)
    @rule(fails=st.booleans())
    def end_of_an_arrival(self, fails: bool) -> None:
        copy = self.arriving.pop()
        if fails:
            self.index.give_up(copy)
            self.index.give_up(copy)
            return
        self.index.admit(copy)
        self.held[copy.key] = copy.stored
        self._used(copy.key)

    @rule(path=st.sampled_from(PATHS), depth=st.integers(1, 5))
    def touch(self, path: list[StorageKey], depth: int) -> None:
        self.index.touch(path[:depth])
        for key in reversed(path[:depth]):
            if key in self.held:
                self._used(key)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: StorageKey) -> None:
        assert (self.index.remove(key, "lost") is not None) == (key in self.held)
        if self.held.pop(key, None) is not None:
            self.age.remove(key)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: StorageKey) -> None:
        self.pins.symmetric_difference_update([key])

    def _used(self, key: StorageKey) -> None:
        if key in self.age:
            self.age.remove(key)
        self.age.append(key)

    @invariant()
    def agrees(self) -> None:
        stats = self.index.stats()
        reserved = sum(victim.stored for victim in self.leaving) + sum(n for _, n in self.begun)
        reserved += sum(copy.stored for copy in self.arriving)
        assert set(self.index.keys()) == set(self.held)
        assert stats.used_bytes == sum(self.held.values())
        assert stats.reserved_bytes == reserved
        for key in self.held:
            entry = self.index.get(key)
            assert entry is not None
            assert entry.children == sum(PARENT[other] == key for other in self.held)

    @invariant()
    def stream_tells_the_contents(self) -> None:
        told: dict[str, int] = {}
        for number, event in enumerate(self.events, start=1):
            assert isinstance(event, ChunkAdmitted | ChunkEvicted)
            assert event.sequence == number
            if isinstance(event, ChunkAdmitted):
                told[event.key] = event.nbytes
            else:
                told.pop(event.key, None)
        assert told == self.held


IndexMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestResidencyIndex = IndexMachine.TestCase
