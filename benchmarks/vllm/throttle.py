"""A way to a server on loopback that lets only so many bytes a second come back: `throttle.py TO RATE`.

Prints the port that it listens on. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

PIECE = 256 << 10


class Bucket:
    """One allowance for all connections."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + nbytes / self._rate
        await asyncio.sleep(self._free_at - now)


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, bucket: Bucket | None) -> None:
    try:
        while data := await source.read(PIECE):
            if bucket is not None:
                await bucket.take(len(data))
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass  # one side is gone, and the other is told
    finally:
        sink.close()


async def main(to: int, rate: float) -> None:
    bucket = Bucket(rate)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        with contextlib.suppress(asyncio.CancelledError):  # this process ends
            await asyncio.gather(copy(reader, back, None), copy(there, writer, bucket))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
