"""The Redis protocol (RESP2): commands as buffers to send, replies received straight into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from redis._parsers.base import BaseParser
from redis.connection import AbstractConnection
from redis.exceptions import InvalidResponse, ResponseError

from lmcache_core.sdk import BackendUnavailable, Call
from lmcache_core_redis.waits import BoundedSocket

Buffer = bytes | memoryview
Argument = bytes | Sequence[Buffer]
"""A command's argument: its bytes, or the buffers that make it up."""
Command = Sequence[Argument]
Place = Callable[[int], Sequence[memoryview]]
"""Says where a bulk string of so many bytes goes: memory of exactly that length."""

_READ_NBYTES = 1 << 14  # more would be copied twice where a long string follows
_MAX_REPLY_NBYTES = 1 << 16  # of a string that isn't placed: names, descriptions, what INFO tells
_MAX_PLACED_NBYTES = 1 << 30  # twice what a server takes by default
_MAX_ELEMENTS = 1 << 20
_MAX_DEPTH = 8  # of arrays in arrays
_MAX_INTEGER = (1 << 63) - 1
_CRLF = b"\r\n"
_BULK, _INTEGER = b"$:"


class ServerError(ResponseError):
    """An error that the server answered. `code` is its first word, such as `OOM`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.code = text.partition(" ")[0]


Reply = bytes | int | None | ServerError | list["Reply"]


def encode(commands: Iterable[Command]) -> list[Buffer]:
    """The commands as they go over the wire. Memory isn't copied: it stands in the list as it is."""
    buffers: list[Buffer] = []
    text: list[bytes] = []
    write = text.append
    for command in commands:
        write(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, bytes):
                write(b"$%d\r\n%b\r\n" % (len(argument), argument))
                continue
            write(b"$%d\r\n" % sum(map(len, argument)))
            for part in argument:
                if isinstance(part, bytes):
                    write(part)
                else:
                    buffers.append(b"".join(text))
                    buffers.append(part)
                    text.clear()
            write(_CRLF)
    if text:
        buffers.append(b"".join(text))
    return buffers


class Receiver(BaseParser):
    """Takes replies from a connection's socket; every wait is bounded by the call that is set.

    redis-py uses it, too, for what it asks when it connects.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = bytearray(_READ_NBYTES)
        self._memory = memoryview(self._buffer)
        self._start = self._end = 0
        self._sock: BoundedSocket | None = None
        self._call: Call | None = None

    def arm(self, call: Call | None) -> None:
        """Serves `call` from now on."""
        self._call = call
        if self._sock is not None:
            self._sock.call = call

    def on_connect(self, connection: AbstractConnection) -> None:
        sock = connection._get_socket()
        assert sock is not None
        self._sock = BoundedSocket(sock)
        self._sock.call = self._call
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return self.stirs

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Reply:
        return self.reply()

    def reply(self, depth: int = 0) -> Reply:
        """The next reply, whatever it is. A string longer than any that is due is read past, and empty.

        Raises:
            DeadlineExceeded, BackendUnavailable, OSError: it didn't come (whole).
            InvalidResponse: what came is not a reply.
        """
        kind, text = self._head()
        if kind == b"$":
            length = _number(text, _MAX_PLACED_NBYTES)
            return None if length < 0 else self._bytes(length)
        if kind == b"*" and depth < _MAX_DEPTH:
            length = _number(text, _MAX_ELEMENTS)
            return None if length < 0 else [self.reply(depth + 1) for _ in range(length)]
        if kind == b":":
            return _number(text, _MAX_INTEGER)
        if kind == b"+":
            return text
        if kind == b"-":
            return ServerError(text.decode("utf-8", errors="replace"))
        raise InvalidResponse(f"not a reply: {kind + text[:40]!r}")

    def replies(self, count: int) -> list[Reply]:
        """The next `count` replies: quickly where they are many and small."""
        replies: list[Reply] = []
        buffer = self._buffer
        while len(replies) < count:
            start, end = self._start, self._end
            at = buffer.find(_CRLF, start, end)
            kind = buffer[start] if at > start else 0
            if kind == _BULK and (length := _number(buffer[start + 1 : at], _MAX_PLACED_NBYTES)) >= 0:
                first, last = at + 2, at + 2 + length
                if buffer.find(_CRLF, last, min(last + 2, end)) == last:
                    replies.append(bytes(buffer[first:last]))
                    self._start = last + 2
                    continue
            elif kind == _INTEGER:
                replies.append(_number(buffer[start + 1 : at], _MAX_INTEGER))
                self._start = at + 2
                continue
            replies.append(self.reply())
        return replies

    def array(self) -> int | ServerError | None:
        """The number of replies in the array that comes next; those are left to be taken."""
        kind, text = self._head()
        if kind == b"*":
            length = _number(text, _MAX_ELEMENTS)
            return None if length < 0 else length
        if kind == b"-":
            return ServerError(text.decode("utf-8", errors="replace"))
        raise InvalidResponse(f"not an array: {kind + text[:40]!r}")

    def bulk(self, place: Place) -> int | ServerError | None:
        """Receives the bulk string that comes next into `place(nbytes)` and returns its length.

        None: there is no such thing. Nothing is placed then, nor where the server answers an error.
        """
        kind, text = self._head()
        if kind == b"$":
            length = _number(text, _MAX_PLACED_NBYTES)
            if length < 0:
                return None
            for memory in place(length):
                self._fill(memory)
            self._end_of_bulk()
            return length
        if kind == b"-":
            return ServerError(text.decode("utf-8", errors="replace"))
        raise InvalidResponse(f"not a bulk string: {kind + text[:40]!r}")

    def _bytes(self, length: int) -> bytes:
        text = bytearray(min(length, _MAX_REPLY_NBYTES))
        for start in range(0, length, _MAX_REPLY_NBYTES):
            self._fill(memoryview(text)[: length - start])
        self._end_of_bulk()
        return bytes(text) if length <= _MAX_REPLY_NBYTES else b""

    def _end_of_bulk(self) -> None:
        if self._line():
            raise InvalidResponse("a bulk string is longer than it said")

    def _head(self) -> tuple[bytes, bytes]:
        line = self._line()
        return line[:1], line[1:]

    def _line(self) -> bytes:
        while (at := self._buffer.find(_CRLF, self._start, self._end)) < 0:
            self._read_more()
        line = bytes(self._memory[self._start : at])
        self._start = at + 2
        return line

    def _read_more(self) -> None:
        left = self._end - self._start
        if left == len(self._buffer):
            raise InvalidResponse("a line without end")
        if self._start:
            self._memory[:left] = self._memory[self._start : self._end]
            self._start, self._end = 0, left
        self._end += self.sock.receive_some(self._memory[self._end :])

    def _fill(self, memory: memoryview) -> None:
        buffered = min(self._end - self._start, len(memory))
        if buffered:
            memory[:buffered] = self._memory[self._start : self._start + buffered]
            self._start += buffered
        if buffered < len(memory):
            self.sock.fill(memory[buffered:])

    @property
    def stirs(self) -> bool:
        """Whether an idle connection isn't quiet and open, as one is that owes no reply."""
        return self._sock is None or self._start < self._end or self._sock.stirs

    @property
    def sock(self) -> BoundedSocket:
        if self._sock is None:
            raise BackendUnavailable("the connection is closed")
        return self._sock


def _number(text: bytes | bytearray, limit: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = limit + 1
    if number > limit:
        raise InvalidResponse(f"not a number that is due here: {text[:40]!r}")
    return number
