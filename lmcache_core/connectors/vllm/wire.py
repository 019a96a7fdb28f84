"""The lookup protocol between the scheduler and a rank: framed msgpack over a Unix socket.

A connection starts with the rank's nonce; then each call has one answer, in order. Either side ends the
connection at anything that it doesn't understand.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TypeAlias

import msgspec

NONCE_NBYTES = 16
MAX_NBYTES = 16 << 20

_LENGTH = struct.Struct("<I")


class Names(msgspec.Struct, frozen=True, array_like=True):
    """A content by its hashes."""

    hashes: list[bytes]
    tails: list[tuple[int, bytes]]


class Hold(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pin the longest prefix in memory, at most `limit` tokens. Answered by `Found`."""

    names: Names
    limit: int


class Found(msgspec.Struct, frozen=True, array_like=True):
    num_tokens: int
    lookup_ids: list[str]


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the pins of lookups. Answered by True."""

    lookup_ids: list[str]


class BringNear(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start bringing the longest prefix into memory, under this id. Answered by True."""

    arrival_id: int
    names: Names


class Arrived(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by the arrival's `Progress`, after at most `wait_s`."""

    arrival_id: int
    wait_s: float


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Whether an arrival has ended, and (tier, tokens) of what it has brought."""

    done: bool
    sources: list[tuple[str, int]]


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the arrival. Answered by its `Progress`."""

    arrival_id: int


Call: TypeAlias = Hold | Release | BringNear | Arrived | Cancel


class WireError(Exception):
    """The other side is gone, late, or says what can't be understood."""


def send(connection: socket.socket, message: object, until: float | None = None) -> None:
    """
    Raises:
        WireError: not sent by `until` (monotonic seconds), or the connection is gone.
    """
    data = msgspec.msgpack.encode(message)
    _arm(connection, until)
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise WireError(f"sending: {error}") from error


def receive(connection: socket.socket, until: float | None = None) -> bytes:
    """The next message's bytes.

    Raises:
        WireError: it isn't there by `until`, is too long, or the connection is gone.
    """
    (nbytes,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, until))
    if nbytes > MAX_NBYTES:
        raise WireError(f"a message of {nbytes} bytes")
    return receive_exactly(connection, nbytes, until)


def receive_exactly(connection: socket.socket, nbytes: int, until: float | None = None) -> bytes:
    """
    Raises:
        WireError: they aren't there by `until`, or the connection is gone.
    """
    data = bytearray()
    while len(data) < nbytes:
        _arm(connection, until)
        try:
            piece = connection.recv(nbytes - len(data))
        except OSError as error:
            raise WireError(f"receiving: {error}") from error
        if not piece:
            raise WireError("the other side has closed")
        data += piece
    return bytes(data)


def _arm(connection: socket.socket, until: float | None) -> None:
    remaining = None if until is None else until - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise WireError("no answer in time")
    connection.settimeout(remaining)
