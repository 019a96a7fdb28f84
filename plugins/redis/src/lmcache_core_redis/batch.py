"""One call's items: where each belongs, which are settled, and how those of a dead server end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.sdk import BackendError, Call, Outcome, Status, StorageKey, strip_traceback
from lmcache_core_redis.layout import Names
from lmcache_core_redis.node import Node, parse_node
from lmcache_core_redis.resp import ServerError

_MISLED = frozenset({"READONLY", "MOVED", "MASTERDOWN", "CLUSTERDOWN"})


@dataclass(frozen=True, slots=True)
class Redirect:
    """A node said that another has this item: for good (`MOVED`), or for this once (`ASK`)."""

    index: int
    node: Node
    asking: bool
    error: ServerError


class Batch:
    """Settles a call's items, each once, and remembers which still need an answer.

    Several threads may use it at once, each for items of its own.
    """

    def __init__(self, keys: Sequence[StorageKey], names: Names, call: Call) -> None:
        self.keys = keys
        self.names = [names.value(key) for key in keys]
        self.call = call
        self.redirects: list[Redirect] = []
        self.misled: set[Node] = set()  # they answered, and aren't the ones to ask any more
        self.statuses: list[Status] = []
        self._open = set(range(len(keys)))

    def done(self, index: int, outcome: Outcome) -> None:
        self._open.discard(index)
        self.statuses.append(outcome.status)
        self.call.done(index, outcome)

    def fail(self, indexes: Sequence[int], error: BackendError) -> None:
        """Settles those of `indexes` that aren't yet."""
        strip_traceback(error)
        for index in indexes:
            if index in self._open:
                self.done(index, Outcome(status=Status.FAILED, error=error))

    def redirected(self, index: int, error: ServerError, asked: Node) -> bool:
        """Notes where `error` sends item `index`, if it does."""
        if error.code in _MISLED:
            self.misled.add(asked)
        words = error.text.split()
        if error.code not in ("MOVED", "ASK") or len(words) != 3:
            return False
        try:
            node = parse_node(words[2])
        except ValueError:
            return False
        here = Node(node.host or asked.host, node.port)  # no host: the one that answered
        self.redirects.append(Redirect(index, here, error.code == "ASK", error))
        return True
