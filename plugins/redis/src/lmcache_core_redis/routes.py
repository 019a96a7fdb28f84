"""Which server has which value: the one there is, the one that Sentinels name, or a cluster's map of slots.

A map is kept until something speaks against it (`doubt`), and is then asked for anew by the next call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from lmcache_core.sdk import BackendError, BackendUnavailable, Call, PermissionDenied
from lmcache_core_redis.deadlines import Within
from lmcache_core_redis.link import Link
from lmcache_core_redis.links import Links
from lmcache_core_redis.node import Node, parse_node
from lmcache_core_redis.resp import Reply, ServerError

T = TypeVar("T")


class Routes(ABC):
    """Finds servers. Thread-safe: a map is replaced as a whole."""

    @abstractmethod
    def nodes(self, call: Call) -> Sequence[Node]:
        """Every server that holds values.

        Raises:
            BackendError: it can't be found out.
        """

    @abstractmethod
    def spread(self, names: Sequence[bytes], call: Call) -> dict[Node, list[int]]:
        """The positions of `names` by the server that has them. Raises as `nodes` does."""

    @abstractmethod
    def doubt(self) -> None:
        """What was known may not hold any more."""


class OneServer(Routes):
    def __init__(self, node: Node) -> None:
        self._node = node

    def nodes(self, call: Call) -> Sequence[Node]:
        return [self._node]

    def spread(self, names: Sequence[bytes], call: Call) -> dict[Node, list[int]]:
        return {self._node: list(range(len(names)))}

    def doubt(self) -> None:
        """There is no other."""


class SentinelPrimary(Routes):
    """The primary that Sentinels know by `name`. `links` are those to the Sentinels."""

    def __init__(self, name: str, sentinels: Sequence[Node], links: Links) -> None:
        self._name = name
        self._sentinels = sentinels
        self._links = links
        self._primary: Node | None = None

    def nodes(self, call: Call) -> Sequence[Node]:
        primary = self._primary
        if primary is None:
            primary = self._primary = _first_answer(self._sentinels, self._links, self._ask, call)
        return [primary]

    def spread(self, names: Sequence[bytes], call: Call) -> dict[Node, list[int]]:
        return {self.nodes(call)[0]: list(range(len(names)))}

    def doubt(self) -> None:
        self._primary = None

    def _ask(self, link: Link) -> Node:
        link.send([(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._name.encode())])
        match link.reply():
            case ServerError() as error:
                raise link.where.of_server(error)
            case [bytes(host), bytes(port)]:
                primary = _node(host, port)
                if primary is not None:
                    others = [node for node in self._sentinels if node != link.node]
                    self._sentinels = [link.node, *others]  # a silent one would cost a share of each call
                    return primary
        raise BackendUnavailable(f"Sentinel {link.node} knows no primary called {self._name}")


class ClusterMap(Routes):
    """The slots of a cluster, found through `seeds` at first and through its own nodes later."""

    def __init__(self, seeds: Sequence[Node], links: Links) -> None:
        self._seeds = seeds
        self._links = links
        self._known: Sequence[Node] = seeds
        self._slots: list[Node | None] | None = None

    def nodes(self, call: Call) -> Sequence[Node]:
        return sorted({node for node in self._map(call) if node is not None}, key=str)

    def spread(self, names: Sequence[bytes], call: Call) -> dict[Node, list[int]]:
        slots = self._map(call)
        anyone = next(node for node in slots if node is not None)
        spread: dict[Node, list[int]] = {}
        for position, name in enumerate(names):
            # A slot that nobody serves is told as such by any node, and costs the other items nothing.
            node = slots[key_slot(name)] or anyone
            spread.setdefault(node, []).append(position)
        return spread

    def doubt(self) -> None:
        self._slots = None

    def _map(self, call: Call) -> list[Node | None]:
        slots = self._slots
        if slots is None:
            slots = _first_answer(self._known, self._links, self._ask, call)
            self._slots = slots
        return slots

    def _ask(self, link: Link) -> list[Node | None]:
        link.send([(b"CLUSTER", b"SLOTS")])
        reply = link.reply()
        if isinstance(reply, ServerError):
            if "cluster support disabled" in reply.text:
                raise PermissionDenied(f"redis server {link.node} is no cluster: leave `cluster` out")
            raise link.where.of_server(reply)
        slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, node in _ranges(reply, link.node):
            slots[first : last + 1] = [node] * (last + 1 - first)
        if len(slots) != REDIS_CLUSTER_HASH_SLOTS or not any(slots):
            raise BackendUnavailable(f"redis server {link.node} knows no slots of its cluster")
        # Who has answered is the first to be asked again: one that is silent would cost a share of each call.
        self._known = list(dict.fromkeys([link.node, *filter(None, slots), *self._seeds]))
        return slots


def _ranges(reply: Reply, asked: Node) -> Iterable[tuple[int, int, Node]]:
    """First slot, last slot and primary, as `CLUSTER SLOTS` lists them."""
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_]:
                # A node that doesn't know its own address leaves it out.
                known = isinstance(host, bytes) and host not in (b"", b"?")
                text = host if known and isinstance(host, bytes) else asked.host.encode()
                node = _node(text, b"%d" % port)
                if node is not None and 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                    yield first, last, node


def _node(host: bytes, port: bytes) -> Node | None:
    """The node at an address that a server has told; None where it is none."""
    try:
        return parse_node(f"{host.decode()}:{port.decode()}")
    except ValueError:
        return None


def _first_answer(nodes: Sequence[Node], links: Links, ask: Callable[[Link], T], call: Call) -> T:
    """What the first node says that can be asked.

    Raises:
        BackendError: none can; says what was wrong with the last.
    """
    last: BackendError
    for position, node in enumerate(nodes):
        try:
            with links.to(node, Within(call.remaining() / (len(nodes) - position), call)) as link:
                return ask(link)
        except BackendError as error:
            last = error
    raise last
