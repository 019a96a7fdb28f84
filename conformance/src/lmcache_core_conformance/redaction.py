"""Keeps secrets, credentials and paths out of what is published."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import unquote, unquote_plus

import msgspec

from lmcache_core.config import ByteSize, Duration, parse_options
from lmcache_core.config.secrecy import is_named_like_a_secret
from lmcache_core.errors import ConfigError
from lmcache_core.storage.secret import Secret
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.disguises import SHOWN, Disguises
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.watch import bounded

Value = bool | int | float | str | None | list[str]
"""What stands in a report where a backend says what it is made of."""
HIDDEN = "(not shown)"
_SENSITIVE = re.compile(
    r"pass|pwd|secret|token|credential|key|auth|signature|cookie|(^|[-_.])(pin|sig|sas|access)([-_.]|$)",
    re.IGNORECASE,
)
"""Names of options whose texts are secrets; of numbers, fewer are (`is_named_like_a_secret`)."""
_LEAST_LENGTH = 4
"""A shorter text isn't taken out: it would stand in unrelated words."""
_LEAST_LINE = 16
_QUOTED = r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"""
_ASSIGNED = re.compile(rf"""([\w.-]+)["']?\s*[=:]\s*(?=({_QUOTED}|[^\s"'<>]+))""")
"""`password=…` in a connection string, `sig=…` in a URL, `"private_key": "…"` in JSON."""
_USER_INFO = re.compile(r"(?:\w://|\b)[^\s:/@]*:(?!//)(?=(\S+)@)|\w://(?=([^\s:/@]+)@)")
"""`user:password@`, or a token alone before the `@`."""
_URL_CREDENTIALS = re.compile(r"(\w://)[^/@\s]+@")
_PARAMETERS = re.compile(
    r"""([?&](?:[\w.-]*(?:sig|signature|token|key|keyid|credential|secret|password|pwd|auth|access))=)"""
    r"""[^&\s#'"]+""",
    re.IGNORECASE,
)
_PASSWORDS = re.compile(
    rf"""\b((?:[\w-]*(?:passw(?:or)?d|passphrase|secret|signature|(?:api|access|account)[_-]?key)|pwd|sig)"""
    rf"""["']?\s*[=:]\s*)(?:{_QUOTED}|[^\s;&,"'<>]+)""",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(r"""(authorization["']?\s*[=:]\s*["']?)(?:(?:basic|bearer)\s+)?[^\s'",]+""", re.I)
_PATHS = (
    (re.compile(r"[^\s'\"(]*/conformance-[a-z0-9_]{8}"), "{tmp}"),
    (re.compile(r'File "[^"]*/([^/"]+)"'), r'File "\1"'),
)


class Redactor:
    """Takes known secrets and credentials in URLs out of a text; for a report, a machine's paths too."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {form for secret in secrets for form in (secret, secret.strip(), *_long_lines(secret))}
        self._known = Disguises(secret for secret in found if len(secret) >= _LEAST_LENGTH)

    @classmethod
    def of(cls, harness: Harness, bench: Bench) -> Redactor:
        """One that knows the secrets in every set of options the harness gives.

        Its hooks that give options are those called `…_config` and `…_credentials`.
        """
        secrets: set[str] = set()

        def look(options_of: Callable[[Path], Mapping[str, object]]) -> None:
            options = options_of(bench.place().directory)
            secrets.update(_sensitive_texts(options, ""), _inside_texts(options))
            secrets.update(_secrets_in(_parsed(harness.backend.config_class, options)))

        for hook in _option_hooks(harness):
            with contextlib.suppress(Exception):  # a hook that fails has given the backend no secret
                bounded(partial(look, getattr(harness, hook)), harness.deadline_s)
        return cls(secrets)

    def conceal(self, text: str) -> str:
        """`text` without secrets in any form: for the terminal, where paths help."""
        text = _URL_CREDENTIALS.sub(rf"\1{SHOWN}@", self._known.hide(text))
        for pattern in (_PARAMETERS, _PASSWORDS, _AUTHORIZATION):
            text = pattern.sub(rf"\1{SHOWN}", text)
        return text

    def clean(self, text: str) -> str:
        """`text` without secrets and paths: for a report."""
        text = self.conceal(text)
        for pattern, replacement in _PATHS:
            text = pattern.sub(replacement, text)
        return text


def redactor_for(harness: Harness) -> Redactor:
    """As `Redactor.of`, on a bench of its own."""
    bench = Bench(harness)
    try:
        return Redactor.of(harness, bench)
    finally:
        bench.close()


def shown_options(config_class: type[object], options: Mapping[str, object]) -> dict[str, Value]:
    """Every option of the config, defaults included: its value if it can't be a secret, else `HIDDEN`.

    Sizes, durations, switches and choices are shown, and numbers that aren't named like a secret.
    """
    config = _parsed(config_class, options)
    if not isinstance(config, msgspec.Struct):
        return {}
    choices = {
        field.name
        for field in msgspec.inspect.type_info(type(config)).fields  # type: ignore[attr-defined]
        if isinstance(field.type, msgspec.inspect.LiteralType | msgspec.inspect.EnumType)
    }
    return {
        field.encode_name: _shown(field.encode_name, getattr(config, field.name), field.name in choices)
        for field in msgspec.structs.fields(config)
    }


def _shown(name: str, value: object, choice: bool) -> Value:
    if isinstance(value, ByteSize | Duration) or (choice and value is not None):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    return value if isinstance(value, int | float) and not is_named_like_a_secret(name) else HIDDEN


def _option_hooks(harness: Harness) -> list[str]:
    endings = ("_config", "_credentials")
    return [name for name in dir(harness) if name.endswith(endings) and not name.startswith("_")]


def _parsed(config_class: type[object], options: Mapping[str, object]) -> object:
    try:
        return parse_options(config_class, options, "options")
    except ConfigError:
        return None


def _secrets_in(value: object) -> Iterator[str]:
    if isinstance(value, Secret):
        yield value.reveal()
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _secrets_in(getattr(value, name))
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _secrets_in(entry)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _secrets_in(entry)


def _sensitive_texts(value: object, name: str) -> Iterator[str]:
    """Texts and numbers in raw options that are named like secrets, whatever type the config gives them."""
    if isinstance(value, str) and _SENSITIVE.search(name):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool) and is_named_like_a_secret(name):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            inherited = f"{name}.{key}" if is_named_like_a_secret(name) else str(key)
            yield from _sensitive_texts(entry, inherited)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _sensitive_texts(entry, name)


def _inside_texts(value: object) -> Iterator[str]:
    """Credentials inside URLs, connection strings and other free texts."""
    if isinstance(value, str):
        for name, secret in _ASSIGNED.findall(value):
            if _SENSITIVE.search(name):
                yield from _as_written(secret, "&;,")
        for password, user in _USER_INFO.findall(value):
            yield from _as_written(password or user, "@")
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _inside_texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _inside_texts(entry)


def _as_written(secret: str, ends: str) -> Iterator[str]:
    """The forms that may be meant: in quotes, with escapes, quoted for a URL, and up to each of `ends`."""
    bare = secret[1:-1] if secret[:1] in ("'", '"') else secret
    for cut in (bare, *(bare.partition(end)[0] for end in ends)):
        yield from (cut, unquote(cut), unquote_plus(cut), re.sub(r"\\(.)", r"\1", cut))


def _long_lines(secret: str) -> list[str]:
    """Of a key in several lines, each line that says much by itself."""
    return [line for line in secret.splitlines() if len(line) >= _LEAST_LINE]
