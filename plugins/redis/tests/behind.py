"""What stands behind the backend: a value as a stock client finds it on the server.

A value is one hash `<namespace>:{<key>}`: its field `m` describes it, the fields `0`, `1`, … are its pieces,
each after 16 bytes that say of which put it is. Nothing here is the backend's own code.
"""

from __future__ import annotations

from collections.abc import Callable

import redis

META = b"m"
TAG_NBYTES = 16
LEFTOVERS_LAST_S = 3600
"""How long what a killed writer left behind may stay, at most."""


def name_of(namespace: str, key: str) -> str:
    return f"{namespace}:{{{key}}}"


def read(client: redis.Redis, name: str) -> bytes | None:
    """The value under `name`; None for nothing.

    Raises:
        AssertionError: its pieces are of different puts.
    """
    fields: dict[bytes, bytes] = client.hgetall(name)
    if not fields:
        return None
    assert META in fields, f"{name} has no description"
    pieces = [fields[b"%d" % number] for number in range(len(fields) - 1)]
    assert len({piece[:TAG_NBYTES] for piece in pieces}) <= 1, f"{name} is a mixture of several puts"
    return b"".join(piece[TAG_NBYTES:] for piece in pieces)


def damage(client: redis.Redis, name: str, value: bytes) -> None:
    """Puts `value` where the bytes of the value under `name` are; the last piece has what is left over."""
    fields: dict[bytes, bytes] = client.hgetall(name)
    assert fields, f"{name} was not stored"
    position = 0
    for number in range(len(fields) - 1):
        piece = fields[b"%d" % number]
        is_last = number == len(fields) - 2
        length = len(value) - position if is_last else len(piece) - TAG_NBYTES
        client.hset(name, str(number), piece[:TAG_NBYTES] + value[position : position + length])
        position += length


def litter(client_of: Callable[[str], redis.Redis], namespace: str) -> None:
    """What other programs may leave under names that look like the backend's own."""
    text, fields = f"{namespace}:{{c-text}}", f"{namespace}:{{c-hash}}"
    client_of(text).set(text, "of another type")
    client_of(fields).hset(fields, "field", "without a description")
    no_key, no_value = f"{namespace}:{{Not A Key}}", f"{namespace}:{{c-nonsense}}"
    for name in (no_key, no_value):
        client_of(name).hset(name, mapping={META.decode(): b"?" * 64, "0": b"!" * 64})
    no_braces, neighbour = f"{namespace}:no-braces", f"{namespace}s:{{c-other}}"
    client_of(no_braces).rpush(no_braces, "a list")
    client_of(neighbour).set(neighbour, "of a neighbouring namespace")


def count(client: redis.Redis, namespace: str) -> int:
    """The keys that belong to a namespace, without those that the server will soon remove by itself."""
    names = [*client.scan_iter(f"{namespace}[:.]*", count=1000)]
    return sum(not _expires(client, namespace, name.decode()) for name in names)


def _expires(client: redis.Redis, namespace: str, name: str) -> bool:
    """Whether it is a writer's temporary that ends by itself; a value that expires is still a value."""
    return not name.startswith(f"{namespace}:") and 0 < int(client.ttl(name)) <= LEFTOVERS_LAST_S
