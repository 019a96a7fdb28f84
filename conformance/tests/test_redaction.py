"""No form of a secret that the options hold reaches a report, a page or the terminal."""

from __future__ import annotations

import ast
import base64
import html
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, quote_plus

import msgspec
import pytest

from conformance_backends.harness import SmallHarness
from conformance_backends.memory import MemoryBackend
from lmcache_core.errors import BackendUnavailable
from lmcache_core.storage.contract import Call, Item
from lmcache_core.storage.secret import Secret
from lmcache_core_conformance import PROPERTIES, run
from lmcache_core_conformance.baselines import PlainCopy, RawDriver
from lmcache_core_conformance.html import render
from lmcache_core_conformance.redaction import HIDDEN, Redactor, redactor_for, shown_options
from lmcache_core_conformance.report import describe, encode

SECRETS = (
    "correct horse",
    "s3cr3t p@ss/'w\\ord",
    "both \"quotes\" and 'apostrophes'",
    "<a&b>=100% + ~x",
    "pässwörd €uro 🔑",
    "two\nlines\tand a tab",
    "12345678",
    "1234",
)
FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda secret: repr(secret.encode()),
    "repr in a repr": lambda secret: repr([repr(secret)]),
    "repr beside a quote": lambda secret: repr("it's " + '"' + secret),
    "JSON": json.dumps,
    "JSON as it is": lambda secret: json.dumps(secret, ensure_ascii=False),
    "JSON in JSON": lambda secret: json.dumps(json.dumps(secret)),
    "HTML": html.escape,
    "HTML of repr": lambda secret: html.escape(repr(secret)),
    "HTML with numbers": lambda secret: html.escape(secret).replace("&#x27;", "&#39;"),
    "HTML in HTML": lambda secret: html.escape(html.escape(secret)),
    "URL": lambda secret: quote(secret, safe=""),
    "URL path": quote,
    "URL form": quote_plus,
    "URL in small letters": lambda secret: quote(secret, safe="").replace("%2F", "%2f"),
    "URL with delimiters left": lambda secret: quote(secret, safe="!$&'()*+,;="),
    "URL in a URL": lambda secret: quote(quote(secret, safe=""), safe=""),
    "hex": lambda secret: secret.encode().hex(),
    "hex in capitals": lambda secret: secret.encode().hex().upper(),
    "hex with colons": lambda secret: secret.encode().hex(":"),
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "Basic, of one user": lambda secret: base64.b64encode(f"u:{secret}".encode()).decode(),
    "Basic, of another user": lambda secret: base64.b64encode(f"me:{secret}".encode()).decode(),
    "Basic, of a third user": lambda secret: base64.b64encode(f"root:{secret}".encode()).decode(),
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(f"??>:{secret}??>".encode()).decode(),
    "base64 in a URL": lambda secret: quote(base64.b64encode(f"?>{secret}?>".encode()), safe=""),
}
"""How a driver, a log or the suite itself may write a secret."""


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_secret_is_hidden_in_every_form(form: Callable[[str], str], secret: str) -> None:
    text = f"the login with <{form(secret)}> was refused"
    shown = Redactor([secret, "another one"]).conceal(text)
    assert shown.startswith("the login with ")
    assert shown.endswith(" was refused")
    left = shown.removeprefix("the login with ").removesuffix(" was refused")
    assert "***" in left
    assert re.sub(r"it\\*'s|&(amp;)*#?\w+;|\bb(?=['\"])|\W", "", left) == ""  # nothing but quotes


def test_what_is_no_secret_is_left_alone() -> None:
    text = (
        "key c-0f1e2d3c: token=7, keys=3, /home/me/pass-through: it's 100% <b>bold</b>, aGVsbG8gd29ybGQ="
        " 68656c6c6f tokens: 16 authors: none"
    )
    assert Redactor(SECRETS).conceal(text) == text


def test_a_hostile_text_takes_no_time_to_speak_of() -> None:
    redactor = Redactor([*SECRETS, "\\'\\'", "++++"])
    for piece in ("A", "\\", "%25", "&amp;", "/", "a=", "://", "x:", "Y29y"):
        started = time.process_time()
        redactor.conceal(piece * 50_000)
        assert time.process_time() - started < 5.0, piece  # quadratic time would be minutes


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    text: str = ""
    pin: int = 0
    password: int = 0
    auth: dict[str, int] = {}
    chunk_tokens: int = 256
    login: Secret | None = None


class TextBackend(MemoryBackend):
    config_class = TextConfig  # type: ignore[assignment]

    def __init__(self, config: TextConfig) -> None:
        super().__init__(MemoryBackend.config_class())


def redactor_knowing(options: Mapping[str, object]) -> Redactor:
    class Texts(SmallHarness):
        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            return options

    return redactor_for(Texts(TextBackend))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("host=db user=me password=hunter22 sslmode=off", "hunter22"),
        ("host=db password='hunter 22' user=me", "hunter 22"),
        (r"host=db password='hun\'ter22' user=me", "hun'ter22"),
        ("host=db password=hun&ter;22 user=me", "hun&ter;22"),
        ("Server=db;Pwd=hunter22;Database=kv", "hunter22"),
        ("AccountName=me;AccountKey=aHVudGVyMjI=;Suffix=net", "aHVudGVyMjI="),
        ("redis://me:hunter22@host:6379/0", "hunter22"),
        ("redis://:hunter%2F22@host", "hunter/22"),
        ("redis://me:hun@ter22@host", "hun@ter22"),
        ("redis://me:hunter22@one,redis://me:hunter33@two", "hunter33"),
        ("https://hunter22@host/repository", "hunter22"),
        ("me:hunter22@host", "hunter22"),
        ("https://store/x?sv=1&sig=hunter22%3D&se=2", "hunter22="),
        ("https://store/x?sig=SIGNATUREabc&access=AKIAEXAMPLE99", "AKIAEXAMPLE99"),
        ("https://s3/x?X-Amz-Signature=hunter22&X-Amz-Date=1", "hunter22"),
        ("https://s3/x?X-Amz-Security-Token=hunter22#part", "hunter22#part"),
        ("https://host/?access_token=hunter22", "hunter22"),
        ('{"type": "account", "private_key": "hunter22"}', "hunter22"),
        ("Authorization: Bearer hunter22", "Bearer"),
    ],
)
def test_a_secret_inside_a_free_text_is_hidden_wherever_it_is_shown(text: str, secret: str) -> None:
    for options in ({"text": text}, {"login": text}):
        shown = redactor_knowing(options).conceal(
            f"cannot use {secret!r} of {text}: {quote(secret, safe='')}"
        )
        assert secret not in shown
        assert quote(secret, safe="") not in shown
        assert repr(secret)[1:-1] not in shown


def test_the_lines_of_a_key_are_hidden_one_by_one() -> None:
    lines = ["MIIEvQIBADANBgkqhkiG", "9w0BAQEFAASCBKcwggSj", "AgEAAoIBAQC7"]
    pem = "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----"])
    assert redactor_knowing({"login": pem}).conceal(f"bad line {lines[1]}!") == "bad line ***!"


def test_numbers_named_like_secrets_are_hidden_and_others_are_shown() -> None:
    options: Mapping[str, object] = {"pin": 4321, "password": 12345678, "auth": {"pin": 8765}}
    shown = redactor_knowing(options).conceal("4321, 12345678 and 8765 of 256")
    assert shown == "***, *** and *** of 256"
    assert shown_options(TextConfig, options) == {
        "text": HIDDEN,
        "pin": HIDDEN,
        "password": HIDDEN,
        "auth": HIDDEN,
        "chunk_tokens": 256,
        "login": None,
    }


@pytest.mark.parametrize(
    "text",
    [
        "GET https://host/x?a=1&X-Amz-Signature=hunter22 failed",
        "GET https://host/x?sig=hunter22 failed",
        "GET https://me:hunter22@host/ failed",
        "connect host=db password=hunter22 failed",
        "connect host=db password='hunter22' failed",
        'body {"client_secret": "hunter22"} failed',
        "sent Authorization: Basic hunter22",
        "sent {'Authorization': 'Bearer hunter22'}",
    ],
)
def test_credentials_that_no_option_holds_are_hidden_by_their_place(text: str) -> None:
    shown = Redactor(()).conceal(text)
    assert "hunter22" not in shown
    assert shown.split()[0] == text.split()[0]


class Quoting(TextBackend):
    """Says its password in each form."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        self.said = "; ".join(form(config.login.reveal() if config.login else "") for form in FORMS.values())

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        raise BackendUnavailable(self.said)


class QuotingDriver(PlainCopy):
    description = "a driver with password=hunter22"


class QuotingHarness(SmallHarness):
    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {"login": SECRETS[1]}

    def raw_driver(self, tmp: Path) -> RawDriver:
        return QuotingDriver()


def test_no_form_of_a_secret_reaches_the_report_or_its_page() -> None:
    harness = QuotingHarness(Quoting)
    name = "test_a_value_comes_back_byte_for_byte"
    document = describe(run(harness, properties=[name]), harness)
    [result] = document.results
    assert result.detail.count("***") == len(FORMS)
    for text in (encode(document).decode(), render(document), html.unescape(render(document))):
        for form in FORMS.values():
            assert form(SECRETS[1]) not in text
        assert "s3cr3t" not in text


def test_no_form_of_a_secret_is_shown_by_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from lmcache_core_conformance import BackendConformance
        from test_redaction import Quoting, QuotingHarness

        class TestQuoting(BackendConformance):
            harness = QuotingHarness(Quoting)
        """
    )
    result = pytester.runpytest_inprocess("-k", "comes_back_byte_for_byte", "--showlocals", "-vv")
    result.assert_outcomes(failed=1, deselected=len(PROPERTIES) - 1)
    text = result.stdout.str()
    assert "***" in text
    assert "s3cr3t" not in text
    for form in FORMS.values():
        assert form(SECRETS[1]) not in text


def test_a_harness_that_gives_no_options_has_no_secrets() -> None:
    class Broken(SmallHarness):
        def fresh_config(self, tmp: Path) -> Mapping[str, object]:
            raise RuntimeError("no server")

    assert redactor_for(Broken(MemoryBackend)).conceal("hunter22") == "hunter22"


def test_what_a_bare_driver_says_of_itself_is_cleaned() -> None:
    harness = QuotingHarness(TextBackend)
    name = "test_writing_keeps_up_with_the_bare_medium"
    [figure] = describe(run(harness, properties=[name]), harness).figures
    assert figure.baseline == "a driver with password=***"


def test_the_forms_tried_here_are_those_of_the_real_functions() -> None:
    assert ast.literal_eval(FORMS["repr"](SECRETS[1])) == SECRETS[1]
    assert html.unescape(FORMS["HTML"](SECRETS[1])) == SECRETS[1]


SECRET = "hunter2-Zx9!quw"


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (SECRET.upper(), "***"),
        (SECRET.lower(), "***"),
        (SECRET[:-1], "***"),
        (SECRET[3:], "***"),
        (f"{SECRET[:8]} {SECRET[7:]}", "*** ***"),
        (f"{SECRET[2:12].upper()}…", "***…"),
        (f"{SECRET[:9]}{SECRET[5:]}", "***"),
        (SECRET[:7], SECRET[:7]),
    ],
)
def test_a_secret_is_hidden_in_any_case_and_where_much_of_it_is_cut_out(told: str, shown: str) -> None:
    assert Redactor([SECRET]).conceal(f"login as {told} failed") == f"login as {shown} failed"
