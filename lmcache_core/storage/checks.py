"""What the core checks of every backend: honest outcomes, frames that are the key's own, capabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from lmcache_core.errors import BackendError, PluginError
from lmcache_core.frame import FrameHeader, verify, verify_prefix
from lmcache_core.identity.keys import PART_DIGEST_CHARS, StorageKey
from lmcache_core.storage.call import Operation
from lmcache_core.storage.contract import Capabilities, Item, Outcome, Status
from lmcache_core.storage.faults import failed, wrapped

_ALLOWED = {
    Operation.GET: frozenset({Status.OK, Status.MISS, Status.TOO_SMALL, Status.FAILED}),
    Operation.PUT: frozenset({Status.OK, Status.FULL, Status.FAILED}),
    Operation.STAT: frozenset({Status.OK, Status.MISS, Status.FAILED}),
    Operation.DELETE: frozenset({Status.OK, Status.MISS, Status.FAILED}),
    Operation.SCAN: frozenset({Status.OK, Status.FAILED}),
}
_OFFERS = ("delete", "scan", "ranged", "persistent", "authenticated", "pin")
_FLAGS = (*_OFFERS, "shared", "self_evicting", "asynchronous")
_MEDIA = ("memory", "file", "network")
_LIMITS = ("max_value_bytes", "max_batch", "max_in_flight")


def examine(
    operation: Operation, target: Item | StorageKey, outcome: object, *, tier: str
) -> tuple[Outcome, str]:
    """What the core believes of `outcome`, and how the backend broke the contract (empty: it did not).

    A dishonest outcome becomes FAILED. A put that is OK always carries the value's length; a failure
    always an error of ours, stripped, that names tier, operation and key, and nothing else carries one.
    """
    if _is_plainly_good(outcome, operation, target):
        return outcome, ""
    fault = _fault(operation, target, outcome)
    if fault:
        error = BackendError(f"the backend broke its contract: {fault}")
        return failed(wrapped(error, tier=tier, op=operation.value, key=_key_of(target))), fault
    assert isinstance(outcome, Outcome)
    if outcome.status is Status.FAILED:
        return _attributed(outcome, tier, operation.value, _key_of(target)), ""
    if outcome.error is not None:
        outcome = replace(outcome, error=None)
    if operation is Operation.PUT and outcome.status is Status.OK and outcome.nbytes == 0:
        nbytes = target.nbytes if isinstance(target, Item) else 0
        return Outcome(status=Status.OK, nbytes=nbytes, stored=outcome.stored, token=outcome.token), ""
    return outcome, ""


def must_verify(item: Item) -> bool:
    """Whether `check_frame` can judge what was read: a whole frame, or a range from its first byte."""
    return item.whole or item.offset == 0


def check_frame(item: Item, nbytes: int) -> FrameHeader:
    """The header of the frame that was read into `item`, proved to be whole and the key's own.

    Of a range only header and first segment are proved.

    Raises:
        Corrupt: anything else.
        BackendError: the bytes don't lie in host memory.
    """
    check = verify if item.whole else verify_prefix
    return check(_bytes_read(item, nbytes), key=item.key, part=_part_of(item.key))


def narrowed(declared: object, opened: object) -> Capabilities:
    """The capabilities in force after `open`.

    Raises:
        PluginError: either isn't a Capabilities that makes sense, or `opened` offers more than `declared`.
    """
    before = checked_capabilities(declared, "its capabilities")
    if opened is None:
        return before
    now = checked_capabilities(opened, "what open returned")
    wider = [name for name in _OFFERS if getattr(now, name) and not getattr(before, name)]
    wider += [name for name in _LIMITS if _exceeds(getattr(now, name), getattr(before, name))]
    if not now.devices <= before.devices:
        wider.append("devices")
    if wider:
        raise PluginError(f"open returned more than was declared before it: {', '.join(wider)}")
    return now


def checked_capabilities(offers: object, what: str) -> Capabilities:
    """`offers`, once every field is what it can be. `what` names them in the error.

    Raises:
        PluginError: it isn't a Capabilities; or names the first field that makes no sense.
    """
    if not isinstance(offers, Capabilities):
        raise PluginError(f"{what}: a {type(offers).__name__}, not Capabilities")
    for name, wanted, fine in _field_rules(offers):
        if not fine:
            raise PluginError(f"{what}: {name} is {getattr(offers, name)!r}, not {wanted}")
    return offers


def _field_rules(offers: Capabilities) -> Iterator[tuple[str, str, bool]]:
    """Each field with what it must be, in words, and whether it is."""
    yield "medium", "one of " + ", ".join(map(repr, _MEDIA)), offers.medium in _MEDIA
    for name in _FLAGS:
        yield name, "True or False", isinstance(getattr(offers, name), bool)
    for name in ("range_min", "max_in_flight"):
        yield name, "a whole number of at least 1", _is_count(getattr(offers, name))
    for name in ("max_value_bytes", "max_batch"):
        value = getattr(offers, name)
        yield name, "None or a whole number of at least 1", value is None or _is_count(value)
    devices = offers.devices
    named = isinstance(devices, frozenset) and bool(devices) and all(isinstance(one, str) for one in devices)
    yield "devices", "a frozenset of names", named
    cost = offers.stat_cost_s
    yield "stat_cost_s", "a number of seconds", isinstance(cost, int | float) and 0 <= cost < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_plainly_good(outcome: object, operation: Operation, target: Item | StorageKey) -> TypeGuard[Outcome]:
    """Whether all of a value was put or read and nothing else is said, as of nearly every item."""
    return (
        type(outcome) is Outcome
        and outcome.status is Status.OK
        and type(target) is Item
        and type(outcome.nbytes) is int
        and outcome.nbytes == target.nbytes
        and (operation is Operation.GET or operation is Operation.PUT)
        and outcome.error is None
        and outcome.stored is None
        and outcome.token is None
    )


def _fault(operation: Operation, target: Item | StorageKey, outcome: object) -> str:
    if not isinstance(outcome, Outcome):
        return f"the outcome is a {type(outcome).__name__}"
    status, nbytes = outcome.status, outcome.nbytes
    if status is Status.TIMEOUT:
        return "TIMEOUT is for the core to say"
    if status is not Status.OK and not (isinstance(status, Status) and status in _ALLOWED[operation]):
        return f"{status!r} is no outcome of a {operation.value}"
    if type(nbytes) is not int or nbytes < 0:
        return f"nbytes is {nbytes!r}"
    if outcome.stored is not None and (type(outcome.stored) is not int or outcome.stored < 0):
        return f"stored is {outcome.stored!r}"
    if outcome.token is not None and (type(outcome.token) is not int or outcome.token < 0):
        return f"token is {outcome.token!r}"
    if outcome.error is not None and not isinstance(outcome.error, BaseException):
        return f"the error is a {type(outcome.error).__name__}"
    return _length_fault(operation, target, status, nbytes) if isinstance(target, Item) else ""


def _length_fault(operation: Operation, item: Item, status: Status, nbytes: int) -> str:
    if status is Status.TOO_SMALL:
        return "" if nbytes > item.nbytes else f"{nbytes} bytes are called too many for {item.nbytes}"
    if status is not Status.OK:
        return ""
    if operation is Operation.PUT:
        return "" if nbytes in (0, item.nbytes) else f"{nbytes} bytes were put of {item.nbytes}"
    if nbytes > item.nbytes or (nbytes < item.nbytes and not item.whole):
        return f"{nbytes} bytes were read for {item!r}"
    return ""


def _attributed(outcome: Outcome, tier: str, op: str, key: str) -> Outcome:
    error = wrapped(outcome.error or BackendError("failed without saying why"), tier=tier, op=op, key=key)
    return outcome if error is outcome.error else failed(error)


def _key_of(target: Item | StorageKey) -> str:
    return target.key if isinstance(target, Item) else target


def _bytes_read(item: Item, nbytes: int) -> memoryview:
    """The first `nbytes` bytes of the item's views. Frames read into one view aren't copied."""
    if len(item.views) == 1 and (memory := item.views[0].host) is not None:
        return memory[:nbytes]
    pieces = []
    left = nbytes
    for view in item.views:
        memory = view.host
        if memory is None:
            raise BackendError(f"a frame on {view.device} can't be verified here", key=item.key)
        pieces.append(memory[: min(left, view.nbytes)])
        left -= len(pieces[-1])
        if left == 0:
            break
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _part_of(key: StorageKey) -> str | None:
    """The part digest that stands in a key: none for records; None where the key is of another form."""
    if key.startswith("c-"):
        return key[2 : 2 + PART_DIGEST_CHARS]
    return "" if key.startswith("n-") else None


def _exceeds(limit: int | None, declared: int | None) -> bool:
    """Whether `limit` is above `declared`; None is no limit."""
    return declared is not None and (limit is None or limit > declared)
