"""One flight a key: each waiter gets a share of what lands, and nothing that comes too late stays."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_backend import key_of

from lmcache_core.tiers.flights import Flights, Ticket


class Piece:
    """Something that is to be released once; shares are pieces of their own."""

    def __init__(self) -> None:
        self.releases = 0
        self.shares: list[Piece] = []

    def share(self, owner: str) -> Piece:
        self.shares.append(Piece())
        return self.shares[-1]

    def release(self) -> None:
        self.releases += 1


@pytest.mark.parametrize("end", ["timed out", "abandoned", "abandoned with it"])
def test_what_comes_when_nobody_waits_any_more_is_released(end: str) -> None:
    ticket, piece = Ticket[Piece](key_of(1)), Piece()
    if end == "timed out":
        assert ticket.result(0.0) is None
        assert ticket.reason == "deadline"
        ticket.deliver(piece)
    elif end == "abandoned":
        ticket.abandon()
        ticket.deliver(piece)
    else:
        ticket.deliver(piece)
        ticket.abandon()
    assert piece.releases == 1
    assert ticket.result(0.0) is None


def test_a_piece_goes_to_its_waiter_once() -> None:
    ticket, piece = Ticket[Piece](key_of(1)), Piece()
    ticket.deliver(piece)
    assert ticket.result(0.0) is piece
    assert ticket.result(0.0) is None
    ticket.abandon()
    assert piece.releases == 0


def test_all_who_joined_a_flight_get_a_share_and_the_next_one_flies_anew() -> None:
    flights, piece = Flights(), Piece()
    tickets: list[Ticket[Any]] = [Ticket(key_of(1)), Ticket(key_of(1)), Ticket(key_of(2))]
    assert flights.join(tickets) == [key_of(1), key_of(2)]
    assert flights.join([late := Ticket[Any](key_of(1))]) == []
    tickets[1].abandon()
    frame: Any = piece
    flights.land(key_of(1), frame)
    assert [ticket.result(0.0) for ticket in (tickets[0], late)] == [piece.shares[0], piece.shares[2]]
    assert piece.shares[1].releases == 1
    assert piece.releases == 0
    assert flights.num_waiting == 1
    flights.land(key_of(2), None, "gone")
    assert (tickets[2].result(0.0), tickets[2].reason) == (None, "gone")
    assert flights.join([Ticket[Any](key_of(1))]) == [key_of(1)]
