"""Which of the frames that come from a tier are kept in the nearer ones."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lmcache_core.identity.keys import StorageKey
from lmcache_core.tiers.requests import Policy

MAX_SEEN = 65_536


class Promotion:
    """Remembers what was loaded once, as far as a policy asks for a second hit. Thread-safe; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _seen
        self._seen: OrderedDict[StorageKey, None] = OrderedDict()

    def wanted(self, policy: Policy, key: StorageKey) -> bool:
        """Whether `key`, just loaded from a tier with this policy, is to be kept nearer."""
        if policy.promote != "on_second_hit":
            return policy.promote == "always"
        with self._lock:
            if key in self._seen:
                del self._seen[key]
                return True
            self._seen[key] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return False
