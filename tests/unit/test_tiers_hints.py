"""What is believed of a store that others change too: for seconds, and never of what was bad."""

from __future__ import annotations

from scripted_backend import key_of

from lmcache_core.tiers.hints import HINT_TTL_S, MAX_BELIEVED, Hints


def test_a_yes_is_believed_until_its_time_is_over_and_no_longer_after_a_no() -> None:
    now = [100.0]
    hints = Hints(lambda: now[0])
    hints.believe(key_of(1))
    hints.believe(key_of(2))
    hints.disbelieve(key_of(2))
    assert [hints.believes(key_of(number)) for number in (1, 2, 3)] == [True, False, False]
    now[0] += HINT_TTL_S
    assert not hints.believes(key_of(1))
    hints.believe(key_of(1))
    assert hints.believes(key_of(1))


def test_the_oldest_yes_is_forgotten_for_the_newest() -> None:
    hints = Hints(lambda: 0.0)
    forgotten = [key for number in range(MAX_BELIEVED) for key in hints.believe(key_of(number))]
    hints.believe(key_of(0))  # once more: it is the newest now
    assert not forgotten
    assert hints.believe(key_of(MAX_BELIEVED)) == [key_of(1)]


def test_what_was_bad_is_rejected_until_it_is_written_anew() -> None:
    hints = Hints(lambda: 0.0)
    hints.believe(key_of(1))
    hints.reject(key_of(1))
    assert hints.rejects(key_of(1))
    assert not hints.believes(key_of(1))
    hints.accept(key_of(1))
    assert not hints.rejects_any
