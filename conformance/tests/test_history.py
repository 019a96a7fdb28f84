"""The judge of racing calls: accepts what some order explains, and nothing else."""

from __future__ import annotations

import pytest

from lmcache_core_conformance.history import ABSENT, Kind, Operation, is_linearizable

WRITE, READ, MAYBE, PRESENT = Kind.WRITE, Kind.READ, Kind.MAYBE, Kind.PRESENT


def history(*operations: tuple[Kind, int, int, int]) -> list[Operation]:
    return [Operation(*operation) for operation in operations]


@pytest.mark.parametrize(
    "operations",
    [
        history(),
        history((READ, ABSENT, 0, 1), (WRITE, 1, 2, 3), (READ, 1, 4, 5)),
        history((WRITE, 1, 0, 9), (READ, ABSENT, 1, 2), (READ, 1, 3, 4)),
        history((WRITE, 1, 0, 5), (WRITE, 2, 1, 6), (READ, 1, 7, 8)),
        history((WRITE, 1, 0, 1), (WRITE, ABSENT, 2, 3), (READ, ABSENT, 4, 5)),
        history((MAYBE, 1, 0, 1), (READ, ABSENT, 2, 3), (READ, 1, 4, 5)),
        history((MAYBE, 1, 0, 1), (READ, ABSENT, 2, 3)),
        history((WRITE, 1, 0, 5), (PRESENT, ABSENT, 1, 2), (READ, 1, 3, 4)),
    ],
)
def test_a_history_that_some_order_explains_is_accepted(operations: list[Operation]) -> None:
    assert is_linearizable(operations)


@pytest.mark.parametrize(
    "operations",
    [
        history((READ, 1, 0, 1)),
        history((WRITE, 1, 0, 1), (READ, ABSENT, 2, 3)),
        history((WRITE, 1, 0, 1), (WRITE, 2, 2, 3), (READ, 1, 4, 5)),
        history((WRITE, 1, 0, 9), (READ, 1, 1, 2), (READ, ABSENT, 3, 4)),
        history((WRITE, 1, 0, 5), (WRITE, 2, 1, 6), (READ, 1, 7, 8), (READ, 2, 9, 10)),
        history((WRITE, ABSENT, 0, 1)),
        history((WRITE, 1, 0, 1), (WRITE, ABSENT, 2, 3), (WRITE, ABSENT, 4, 5)),
        history((MAYBE, 1, 4, 5), (READ, 1, 0, 1)),
        history((WRITE, 1, 0, 5), (PRESENT, ABSENT, 1, 2), (READ, ABSENT, 3, 4)),
    ],
)
def test_a_history_that_no_order_explains_is_refused(operations: list[Operation]) -> None:
    assert not is_linearizable(operations)
