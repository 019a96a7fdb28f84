"""The class that is certified: read from the harness once, and not changed while its properties run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partialmethod
from types import FunctionType, MethodDescriptorType
from typing import Any

from lmcache_core.storage.contract import Backend
from lmcache_core_conformance.effort import effort_of
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.verdicts import check

_METHODS = (FunctionType, MethodDescriptorType, classmethod, staticmethod, partialmethod, property)
_DECLARED = ("api", "capabilities", "config_class")


class Certified:
    """A harness and the class of its backend, as both were when the run began.

    Raises:
        TypeError, ValueError: as `effort_of`.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.backend: type[Backend[Any]] = harness.backend
        self.effort = effort_of(harness)
        self._code = dict(_code_of(self.backend))

    def check_unchanged(self) -> None:
        """
        Raises:
            Violation: a method or declaration of the class was replaced, or the harness names another class
                or tries less hard now.
        """
        named: type[object] = self.harness.backend
        check(named is self.backend, f"Harness.backend was {_name(self.backend)}, and is {_name(named)} now")
        effort = effort_of(self.harness)
        check(effort == self.effort, f"the harness's effort was {self.effort}, and is {effort} now")
        code = dict(_code_of(self.backend))
        changed = sorted(
            place for place in {*code, *self._code} if not _same(code.get(place), self._code.get(place))
        )
        check(not changed, f"replaced since the run began: {', '.join(changed)}")


def check_instance(backend: object, meant: type[object]) -> None:
    """
    Raises:
        Violation: `backend` is not of just that class, or has methods of its own instead of the class's.
    """
    kind = type(backend)
    check(kind is meant, f"Harness.build made a {_name(kind)}, no {_name(meant)}: only that is certified")
    own: Mapping[str, object] = getattr(backend, "__dict__", {})
    replaced = [name for name in own if isinstance(inspect.getattr_static(kind, name, None), _METHODS)]
    check(not replaced, f"an instance of {_name(meant)} has its own {', '.join(replaced)}, past its class")


def _code_of(cls: type[object]) -> Iterator[tuple[str, tuple[object, ...]]]:
    """What makes a class behave as it does. State that it keeps in its attributes is no part of that."""
    yield "the bases", cls.__mro__
    for kind in cls.__mro__[:-1]:
        for name, value in list(vars(kind).items()):
            if isinstance(value, _METHODS) or name in _DECLARED:
                yield f"{kind.__qualname__}.{name}", (value, getattr(value, "__code__", None))


def _same(one: tuple[object, ...] | None, other: tuple[object, ...] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(a is b for a, b in zip(one, other, strict=True))


def _name(kind: type[object]) -> str:
    return getattr(kind, "__name__", repr(kind))
