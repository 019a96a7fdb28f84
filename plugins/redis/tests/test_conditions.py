"""What a server answers when it can't do what is asked: told as it is, and over when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from lmcache_core.sdk import BackendUnavailable, Outcome, PermissionDenied, Status

from . import conditions
from .servers import require
from .sites import Site
from .tiers import Tier, fresh_namespace, tier_on
from .users import KEEPER, KEEPER_PASSWORD, TIER, TIER_PASSWORD

Condition = Callable[[Site], AbstractContextManager[None]]

UNAVAILABLE, DENIED, FULL, OK = "unavailable", "denied", "full", "ok"
"""How an operation ends: for a while, until somebody grants it, for want of room, or well."""
CONDITIONS = {
    # condition: how a put ends, how a get ends
    conditions.a_read_only_replica: (DENIED, OK),
    conditions.a_replica_without_its_primary: (DENIED, UNAVAILABLE),
    conditions.too_few_replicas: (UNAVAILABLE, OK),
    conditions.a_disk_that_takes_no_snapshot: (UNAVAILABLE, OK),
    conditions.a_script_that_does_not_end: (UNAVAILABLE, UNAVAILABLE),
    conditions.loading: (UNAVAILABLE, UNAVAILABLE),
    conditions.no_room: (FULL, OK),
    conditions.no_right_to_write: (DENIED, OK),
    conditions.a_user_that_is_locked_out: (DENIED, DENIED),
    conditions.another_password: (DENIED, DENIED),
    conditions.no_user_of_that_name: (DENIED, DENIED),
    conditions.no_connection_to_spare: (UNAVAILABLE, UNAVAILABLE),
}


@pytest.fixture(scope="module")
def site() -> Site:
    return Site(require("redis"), conditions.SETTINGS)


@pytest.fixture
def tier(site: Site) -> Iterator[Tier]:
    with tier_on(site.options(fresh_namespace())) as tier:
        yield tier


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_a_condition_is_told_as_it_is_and_passes(site: Site, tier: Tier, condition: Condition) -> None:
    assert tier.put("before").status is Status.OK
    due_of_put, due_of_get = CONDITIONS[condition]
    with condition(site):
        check(site, tier.put("during"), due_of_put)
        check(site, tier.get("before")[0], due_of_get)
        check(site, tier.stat("before"), due_of_get)
    assert tier.put("after").status is Status.OK
    assert tier.holds("after")
    assert tier.get("during")[0].status is Status.MISS


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_a_value_of_several_pieces_is_refused_whole(site: Site, condition: Condition) -> None:
    options = {**site.options(fresh_namespace()), "piece_bytes": "64KiB"}
    segments = (200_000, 100_000)
    with tier_on(options) as tier:
        assert tier.put("value", 1, segments).status is Status.OK
        with condition(site):
            check(site, tier.put("value", 2, segments), CONDITIONS[condition][0])
        if condition is not conditions.loading:  # that server forgets what it has not saved
            assert tier.holds("value", 1, segments)
        assert tier.put("value", 3, segments).status is Status.OK
        assert tier.holds("value", 3, segments)
        left = [name for name in site.nodes[0].scan_iter(f"{tier.namespace}*") if b".tmp" in name]
        assert all(0 < site.nodes[0].ttl(name) <= 3600 for name in left)


def test_a_full_server_is_opened_and_read(site: Site) -> None:
    options = site.options(fresh_namespace())
    with tier_on(options) as tier:
        assert tier.put("before").status is Status.OK
    with site.full(), tier_on(options) as tier:
        assert tier.holds("before")
        assert tier.put("value").status is Status.FULL


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"password": "wrong"}, "`password`"),
        ({"username": "nobody-knows"}, "`username`"),
        ({"username": None, "password": None}, "`username`"),
        ({"username": KEEPER, "password": KEEPER_PASSWORD}, "ACL"),
        ({"namespace": "of-others"}, "ACL"),
    ],
    ids=["WRONGPASS", "no such user", "NOAUTH", "NOPERM", "NOPERM for the keys"],
)
def test_an_account_that_will_not_do_is_told_when_opening(
    site: Site, change: dict[str, object], remedy: str
) -> None:
    options = {**site.options(fresh_namespace()), **change}
    with (
        pytest.raises(PermissionDenied) as caught,
        tier_on({k: v for k, v in options.items() if v is not None}),
    ):
        pass
    text = str(caught.value)
    assert remedy in text
    assert str(site.proxy.ports[0]) in text
    assert str(options["username"] or "default") in text
    assert not any(secret in text for secret in (TIER_PASSWORD, KEEPER_PASSWORD, "wrong"))


def check(site: Site, outcome: Outcome, due: str) -> None:
    """The outcome is the one due; its message names the server, any user it speaks of, and no secret."""
    if due in (OK, FULL):
        assert outcome.status is Status[due.upper()], outcome
        return
    assert outcome.status is Status.FAILED, outcome
    error = outcome.error
    assert isinstance(error, BackendUnavailable if due == UNAVAILABLE else PermissionDenied), repr(error)
    assert error.retryable is (due == UNAVAILABLE)
    assert str(site.proxy.ports[0]) in str(error)
    assert "user" not in str(error) or f"user {TIER}" in str(error)
    assert TIER_PASSWORD not in str(error)
