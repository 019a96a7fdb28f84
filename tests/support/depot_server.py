"""The server of docs/how-to/publish-a-backend.md: values in memory, in spaces.

    python depot_server.py PORT

A request is `REQUEST` and, for a put, the value; a reply is `REPLY` and, for a get, the value. What is
asked: `P`ut, `G`et the whole value, get a `R`ange, `S`tat, `D`elete, `U`sage. In lower case they are an
administrator's, and always allowed. `x` makes the server `full` or `read-only` for everybody else, or, with
an empty name, neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
import time

REQUEST = struct.Struct("!c256pQQQ")
REPLY = struct.Struct("!cQQQQ")
DENIED, FULL, MISS, OK, TOO_SMALL = b"D", b"F", b"M", b"O", b"S"


class Depot:
    """Everything one server holds. One thread: a request is served in one step once its value is here."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[str, bytes]] = {}
        self._last_reply = time.time_ns()  # numbers grow over a restart, too
        self._state = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    what, name, *numbers = REQUEST.unpack(await reader.readexactly(REQUEST.size))
                    value = await reader.readexactly(numbers[1]) if what in b"Pp" else b""
                    head, found = self._answer(what, name.decode(), value, *numbers)
                    writer.write(head)
                    writer.write(found)
                    await writer.drain()
        finally:
            writer.close()

    def _answer(
        self, what: bytes, name: str, value: bytes, offset: int, nbytes: int, capacity: int
    ) -> tuple[bytes, bytes]:
        """The reply, and the value that follows it."""
        space, _, key = name.rpartition("/")  # no key has one
        if what == b"x":
            self._state = name
            reply, found = (OK, 0), b""
        elif what in b"PD" and self._state == "read-only":
            reply, found = (DENIED, 0), b""
        elif what == b"P" and self._state == "full":
            reply, found = (FULL, 0), b""
        else:
            values = self._spaces.setdefault(space, {})
            reply, found = self._serve(what.upper(), values, key, value, offset, nbytes, capacity)
        stored = self._spaces.get(space, {}).values()
        self._last_reply += 1
        return REPLY.pack(*reply, len(stored), sum(map(len, stored)), self._last_reply), found

    def _serve(
        self,
        what: bytes,
        values: dict[str, bytes],
        key: str,
        value: bytes,
        offset: int,
        nbytes: int,
        capacity: int,
    ) -> tuple[tuple[bytes, int], bytes]:
        if what == b"U":
            return (OK, 0), b""
        stored = values.get(key)
        if what == b"P":
            used = sum(map(len, values.values())) - len(stored or b"") + nbytes
            if capacity and used > capacity:
                return (FULL, 0), b""
            values[key] = value
            return (OK, nbytes), b""
        if stored is None or (what == b"R" and offset + nbytes > len(stored)):
            return (MISS, 0), b""
        if what == b"D":
            del values[key]
            return (OK, 0), b""
        if what == b"R":
            return (OK, nbytes), stored[offset : offset + nbytes]
        if what == b"G" and len(stored) > nbytes:
            return (TOO_SMALL, len(stored)), b""
        return (OK, len(stored)), stored if what == b"G" else b""


async def main(port: int) -> None:
    server = await asyncio.start_server(Depot().serve, "127.0.0.1", port, limit=1 << 20)
    print("serving", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
