"""The options of the cpu backend."""

from __future__ import annotations

import msgspec


class CpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There are none: the tier's `capacity` says how much of the pool its frames may keep."""
