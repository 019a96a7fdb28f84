"""The server of docs/how-to/publish-a-backend.md: values in memory, in spaces, and faults on demand.

    python depot_server.py PORT

A request is `REQUEST` and, for a put, the value; a reply is `REPLY` and, for a get, the value. What is
asked: `P`ut, `G`et the whole value, get a `R`ange, `S`tat, `D`elete, `U`sage. In lower case they go past
faults and counters; `x` sets the fault named in place of a value, `n` asks how many requests came.
"""

from __future__ import annotations

import asyncio
import socket
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
        self._num_requests = 0
        self._last_reply = time.time_ns()  # numbers grow over a restart, too
        self._fault = ""
        self._changed = asyncio.Event()  # set, and replaced, when the fault changes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                what, name, *numbers = REQUEST.unpack(await reader.readexactly(REQUEST.size))
                if what in b"xn":
                    self._control(what, name.decode())
                    writer.write(REPLY.pack(OK, self._num_requests, 0, 0, 0))
                elif not await self._answer(what, name.decode(), numbers, reader, writer):
                    return
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _control(self, what: bytes, name: str) -> None:
        if what == b"x":
            self._fault = name
            self._changed.set()
            self._changed = asyncio.Event()

    async def _answer(
        self,
        what: bytes,
        name: str,
        numbers: list[int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """False: the connection is of no more use."""
        offset, nbytes, capacity = numbers
        raw = what.islower()
        fault = "" if raw else self._fault
        self._num_requests += not raw
        broken = fault in ("reset", "half-closed")
        value = b""
        if what in b"Pp":
            value = await reader.readexactly(nbytes // 2)
            if broken:
                return await self._break(fault, nbytes - len(value), reader, writer)
            value += await reader.readexactly(nbytes - len(value))
        while not raw and self._fault == "stalled":
            await self._changed.wait()
        space, _, key = name.rpartition("/")  # no key has one
        denied = fault == "read-only" and what in b"PD"
        if denied or (fault == "full" and what == b"P"):
            reply, found = (DENIED if denied else FULL, 0), b""
        else:
            reply, found = self._serve(
                what.upper(), self._spaces.setdefault(space, {}), key, value, offset, nbytes, capacity
            )
        values = self._spaces.get(space, {}).values()
        self._last_reply += 1
        head = REPLY.pack(*reply, len(values), sum(map(len, values)), self._last_reply)
        if broken:
            writer.write(head + found[: len(found) // 2] if found else b"")
            return await self._break(fault, 0, reader, writer)
        writer.write(head)
        if fault == "trickling" and found:
            for position in range(len(found)):
                if self._fault != fault or writer.is_closing():
                    return False
                writer.write(found[position : position + 1])
                await asyncio.sleep(0.02)
        else:
            writer.write(found)
        return True

    async def _break(
        self, fault: str, left: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        await writer.drain()
        if fault == "half-closed":
            writer.write_eof()
            await reader.readexactly(left)
            await reader.read()  # until the client gives up
        else:
            linger = struct.pack("ii", 1, 0)  # closing sends a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        return False

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
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
