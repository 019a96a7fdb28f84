"""Pins: values kept from expiry and eviction, for a time, by taking their time to live away.

Under a `volatile-…` policy the server evicts only what can expire. A sorted set holds when each pin ends;
whoever uses the namespace then gives the values their time to live back, so that none is kept for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lmcache_core.sdk import Outcome, Status
from lmcache_core_redis.batch import Batch
from lmcache_core_redis.layout import Names
from lmcache_core_redis.link import Link
from lmcache_core_redis.reading import MISS
from lmcache_core_redis.resp import ServerError

_SWEEP_EVERY_S = 30.0
"""How soon the end of a pin is seen that another process has set."""
_MARGIN_S = 0.01
_NOW = b"local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000) "
_PIN = _NOW + (
    b"if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end "
    b"redis.call('PERSIST', KEYS[1]) "
    b"redis.call('ZADD', KEYS[2], 'GT', now + ARGV[1], KEYS[1]) "
    b"return 1"
)
_SWEEP = _NOW + (
    b"local due = redis.pcall('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000) "
    b"if due.err and string.find(due.err, 'WRONGTYPE') then redis.call('UNLINK', KEYS[1]) return -1 end "
    b"if due.err then return due end "
    b"for _, name in ipairs(due) do "
    b"redis.call('PEXPIRE', name, ARGV[1]) redis.call('ZREM', KEYS[1], name) end "
    b"local following = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1) "
    b"if following[2] then return math.max(following[2] - now, 0) end return -1"
)
STAY_IF_PINNED = b"if redis.call('ZSCORE', KEYS[2], KEYS[1]) then redis.call('PERSIST', KEYS[1]) end return 1"


class Pins:
    """The pins of a namespace on one server."""

    def __init__(self, names: Names, ttl_s: float) -> None:
        self._names = names
        self._ttl_ms = b"%d" % round(ttl_s * 1000)
        self._lock = threading.Lock()  # guards the next
        self._sweep_at = 0.0

    def pin(self, link: Link, indexes: Sequence[int], ttl_s: float, batch: Batch) -> None:
        """Keeps the values for `ttl_s` from now on; a longer pin that they have stays."""
        pins, duration = self._names.pins, b"%d" % round(ttl_s * 1000)
        names = [batch.names[index] for index in indexes]
        link.send([(b"EVAL", _PIN, b"2", name, pins, duration) for name in names])
        for index in indexes:
            reply = link.reply()
            if isinstance(reply, ServerError):
                batch.done(index, link.where.outcome(reply, "pin"))
            else:
                batch.done(index, Outcome(status=Status.OK) if reply == 1 else MISS)
        self.sweep(link)
        self._look_in(ttl_s)

    def sweep(self, link: Link) -> None:
        """Ends the pins that are due, if it is time to look."""
        now = time.monotonic()
        with self._lock:
            if now < self._sweep_at:
                return
            self._sweep_at = now + _SWEEP_EVERY_S
        link.send([(b"EVAL", _SWEEP, b"1", self._names.pins, self._ttl_ms)])
        reply = link.reply()
        if isinstance(reply, ServerError):
            raise link.where.of_server(reply)
        if isinstance(reply, int) and reply >= 0:
            self._look_in(reply / 1000)

    def _look_in(self, delay_s: float) -> None:
        """Has the next sweep come when a pin is due in `delay_s`."""
        due = time.monotonic() + delay_s + _MARGIN_S
        with self._lock:
            self._sweep_at = min(self._sweep_at, due)
