"""The report: what it says, that it can be read again, and that nothing secret is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from conformance_backends.broken_conduct import CountsAttempts
from conformance_backends.broken_performance import ReadsInTinyPieces
from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.config import ByteSize
from lmcache_core.errors import BackendError
from lmcache_core.storage.contract import API, Call, Item
from lmcache_core.storage.secret import Secret
from lmcache_core_conformance import PROPERTIES, Deviation, Harness, Verdict, run
from lmcache_core_conformance.effort import effort_of, reduced
from lmcache_core_conformance.html import headline, render
from lmcache_core_conformance.report import (
    VERSION,
    ReportDocument,
    ReportError,
    describe,
    differences,
    encode,
    parse,
)

GROUPS = ("honesty", "performance")
STATS = "test_stats_count_what_is_stored"
READS = "test_reading_keeps_up_with_the_bare_medium"
RANGES = "test_a_range_past_the_end_is_never_ok"


@cache
def document() -> ReportDocument:
    harness = SmallHarness(CountsAttempts)
    return describe(run(harness, groups=GROUPS), harness, name="attempts")


class LoginConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    password: Secret
    api_token: str
    servers: tuple[dict[str, Secret], ...] = ()
    url: str = "redis://localhost"
    buffer: ByteSize = ByteSize("4MiB")
    mode: Literal["fast", "safe"] = "safe"
    retries: int = 0


class TellsEverything(MemoryBackend):
    """Puts all it knows into its errors."""

    config_class = LoginConfig  # type: ignore[assignment]

    def __init__(self, config: LoginConfig) -> None:  # type: ignore[override]
        super().__init__(MemoryBackend.config_class())
        self.login = config

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        nested = self.login.servers[0]["second"].reveal()
        raise BackendError(
            f"login with {self.login.password.reveal()} and {self.login.api_token} at {nested} failed "
            "at host at https://me:hunter3@host:8000/path, see /somewhere/conformance-abcd1234/store-1/log"
        )


class LoginHarness(SmallHarness):
    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {
            "password": "correct horse",
            "api_token": "battery staple",
            "servers": [{"second": "four random words"}],
        }

    def wrong_credentials(self, tmp: Path) -> Mapping[str, object]:
        return {**self.fresh_config(tmp), "password": "at host"}

    def narrower_credentials(self, tmp: Path) -> Mapping[str, object]:
        raise RuntimeError("no server")


def test_what_is_written_reads_back_the_same() -> None:
    assert parse(encode(document())) == document()


def test_it_says_what_was_certified_with_what_and_where() -> None:
    backend, suite = document().backend, document().suite
    assert backend.implementation == "conformance_backends.broken_conduct:CountsAttempts"
    assert (backend.distribution, backend.version) == ("", "")  # it belongs to no installed distribution
    assert (backend.api, suite.api) == (API, API)
    assert re.fullmatch(r"\d+\.\d+.*", suite.version)
    assert suite.reduced, "a harness that tries less hard than the default is told"
    assert document().environment.processors > 0
    assert document().capabilities["medium"] == "memory"
    assert document().capabilities["devices"] == ["cpu"]


@pytest.mark.parametrize(
    ("name", "weaker", "stronger"),
    [
        ("slack_s", 1e6, 0.1),
        ("deadline_s", 31.0, 29.0),
        ("limit_s", 1e6, 60.0),
        ("threads_end_s", 60.0, 1.0),
        ("stalled_deadline_s", 60.0, 0.1),
        ("meeting_s", 0.1, 4.0),
        ("rounds", 199, 201),
    ],
)
def test_whatever_is_weaker_than_the_default_is_reduced_effort(
    name: str, weaker: float, stronger: float
) -> None:
    class Defaults(Harness):
        backend = MemoryBackend

        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            return {}

    harness = Defaults()
    assert reduced(effort_of(harness)) == ()
    setattr(harness, name, stronger)
    assert reduced(effort_of(harness)) == ()
    setattr(harness, name, weaker)
    report = describe(run(harness, groups=["declaration"]), harness)
    assert report.suite.reduced == (name,)
    assert f"reduced: {name}" in Page(render(report)).text


def test_it_says_what_each_property_is_and_why_it_exists() -> None:
    known = {prop.name: prop for prop in PROPERTIES}
    assert {result.group for result in document().results} == set(GROUPS)
    for result in document().results:
        prop = known[result.name]
        assert (result.group, result.sentence) == (prop.group, prop.sentence)
        assert result.why == " ".join(prop.why.split())
        assert (result.verdict is Verdict.PASSED) == (result.detail == "")
    [failed] = document().of(Verdict.FAILED)
    assert failed.name == STATS


def test_figures_carry_their_baseline_and_their_floor() -> None:
    figures = document().figures
    assert {figure.baseline for figure in figures} == {"a plain copy", "the same one by one"}
    for figure in figures:
        assert figure.ratio > 0
        assert figure.low <= figure.ratio <= figure.high
        assert not figure.enforced


def test_a_property_below_its_floor_does_not_just_say_that_it_passed() -> None:
    harness = SmallHarness(ReadsInTinyPieces)
    report = describe(run(harness, groups=["performance"]), harness)
    slow = {result.name for result in report.results if result.below_floor}
    assert slow == {figure.property for figure in report.figures if figure.ratio < figure.floor}
    assert READS in slow
    assert parse(encode(report)).results == report.results
    assert "passed (below floor)" in Page(render(report)).text
    assert "below the floor of its speed." in headline(report)[1]
    harness.enforce_performance = True
    enforced = run(harness, properties=[READS]).results[0]
    assert (enforced.verdict, enforced.below_floor) == (Verdict.FAILED, False)


def test_a_report_of_the_first_minor_version_is_still_read() -> None:
    earlier = msgspec.json.decode(encode(document()))
    earlier["version"] = [1, 0]
    del earlier["interrupted"]
    for result in earlier["results"]:
        del result["below_floor"]
    read = parse(msgspec.json.encode(earlier))
    assert not read.interrupted
    assert [result.name for result in read.results] == [result.name for result in document().results]


def test_a_later_minor_version_is_read_without_what_is_new_in_it() -> None:
    later = msgspec.json.decode(encode(document()))
    later["version"] = [VERSION[0], VERSION[1] + 1]
    later["weather"] = later["results"][0]["mood"] = "fair"
    assert parse(msgspec.json.encode(later)).results == document().results


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nothing", "not a conformance report"),
        (b"{}", "`format` is ''"),
        (b'{"format": "lmcache-core-conformance-report", "version": [2, 0]}', "is version 2.0"),
        (b'{"format": "lmcache-core-conformance-report", "version": [1, 0]}', "damaged"),
    ],
    ids=["no JSON", "no report", "later major", "incomplete"],
)
def test_what_is_no_report_of_this_major_version_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ReportError, match=re.escape(message)):
        parse(content)


def test_no_secret_reaches_the_report() -> None:
    harness = LoginHarness(TellsEverything)
    report = describe(run(harness, properties=["test_a_value_comes_back_byte_for_byte"]), harness)
    text = encode(report).decode() + render(report)
    for secret in (
        "correct horse",
        "battery staple",
        "four random words",
        "at host",
        "hunter3",
        "/somewhere",
    ):
        assert secret not in text
    [result] = report.results
    assert "login with *** and *** at *** failed *** at https://***@host:8000/path" in result.detail
    assert report.backend.options == {
        "password": "(not shown)",
        "api_token": "(not shown)",
        "servers": "(not shown)",
        "url": "(not shown)",
        "buffer": "4MiB",
        "mode": "safe",
        "retries": 0,
    }


def test_a_deviation_is_reported_with_its_reason() -> None:
    harness = SmallHarness(CountsAttempts)
    harness.deviations = (Deviation(STATS, "counts attempts"),)
    report = describe(run(harness, properties=[STATS]), harness)
    assert [(r.verdict, r.detail) for r in report.results] == [(Verdict.DEVIATION, "counts attempts")]
    assert headline(report)[1] == "Passed, with 1 listed deviation. Only part of the suite was run."


def test_a_backend_that_can_not_be_opened_is_reported_with_what_it_declares() -> None:
    class Closed(MemoryBackend):
        def open(self, host: object) -> None:
            raise BackendError("closed")

    harness: Harness = SmallHarness(Closed)
    report = describe(run(harness, properties=[STATS]), harness)
    assert report.capabilities["delete"] is True
    assert report.of(Verdict.FAILED)


def test_differences_name_properties_that_only_one_report_has() -> None:
    fewer = msgspec.structs.replace(document(), results=document().results[1:])
    name = document().results[0].name
    assert differences(document(), fewer) == [f"{name}: {document().results[0].verdict.value}, then not run"]


class Page(HTMLParser):
    """Checks that tags nest, and keeps what would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        self.outside += [tag] if tag in ("script", "link", "iframe", "object") else []
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_without_scripts_and_without_anything_from_outside() -> None:
    text = render(document())
    page = Page(text)
    assert page.outside == []
    assert "url(" not in text
    assert "@import" not in text
    for result in document().results:
        assert result.sentence[1:] in page.text
        assert result.why.replace("`", "") in page.text.replace("`", "")
    for figure in document().figures:
        assert figure.name in page.text
    assert "1 property failed. Only part of the suite was run." in page.text


def test_what_a_backend_says_is_text_on_the_page_and_never_markup() -> None:
    first = msgspec.structs.replace(document().results[0], detail="<script>alert('&')</script>")
    page = Page(render(msgspec.structs.replace(document(), results=(first,))))
    assert "<script>alert('&')</script>" in page.text
    assert page.outside == []
