"""Keeps secrets, credentials and paths out of what is published."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from lmcache_core.config import ByteSize, Duration, parse_options
from lmcache_core.errors import ConfigError
from lmcache_core.storage.secret import Secret
from lmcache_core_conformance.bench import Bench
from lmcache_core_conformance.harness import Harness

Value = bool | int | float | str | None | list[str]
"""What stands in a report where a backend says what it is made of."""
HIDDEN = "(not shown)"
_SENSITIVE = re.compile(r"pass|secret|token|credential|key|auth", re.IGNORECASE)
_LEAST_LENGTH = 4
"""A shorter text isn't taken out: it would stand in unrelated words."""
_URL_CREDENTIALS = re.compile(r"(\w://)[^/@\s]+@")
_PATHS = (
    (re.compile(r"[^\s'\"(]*/conformance-[a-z0-9_]{8}"), "{tmp}"),
    (re.compile(r'File "[^"]*/([^/"]+)"'), r'File "\1"'),
)


class Redactor:
    """Takes known secrets and credentials in URLs out of a text; for a report, a machine's paths too."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {secret for secret in secrets if len(secret) >= _LEAST_LENGTH}
        self._secrets = sorted(found, key=len, reverse=True)

    @classmethod
    def of(cls, harness: Harness, bench: Bench) -> Redactor:
        """One that knows the secrets in every set of options the harness gives.

        Its hooks that give options are those called `…_config` and `…_credentials`.
        """
        secrets: set[str] = set()
        for hook in _option_hooks(harness):
            options = _options_of(getattr(harness, hook), bench.place().directory)
            secrets.update(_sensitive_texts(options, ""))
            secrets.update(_secrets_in(_parsed(harness.backend.config_class, options)))
        return cls(secrets)

    def conceal(self, text: str) -> str:
        """`text` without secrets: for the terminal, where paths help."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _URL_CREDENTIALS.sub(r"\1***@", text)

    def clean(self, text: str) -> str:
        """`text` without secrets and paths: for a report."""
        text = self.conceal(text)
        for pattern, replacement in _PATHS:
            text = pattern.sub(replacement, text)
        return text


def shown_options(config_class: type[object], options: Mapping[str, object]) -> dict[str, Value]:
    """Every option of the config, defaults included: its value if it can't be a secret, else `HIDDEN`.

    Numbers, sizes, durations, switches and choices are shown.
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
        field.encode_name: _shown(getattr(config, field.name), choice=field.name in choices)
        for field in msgspec.structs.fields(config)
    }


def _shown(value: object, *, choice: bool) -> Value:
    if isinstance(value, ByteSize | Duration) or (choice and value is not None):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float) else HIDDEN


def _option_hooks(harness: Harness) -> list[str]:
    endings = ("_config", "_credentials")
    return [name for name in dir(harness) if name.endswith(endings) and not name.startswith("_")]


def _options_of(hook: Callable[[Path], Mapping[str, object]], directory: Path) -> Mapping[str, object]:
    try:
        return hook(directory)
    except Exception:  # noqa: BLE001 (recorded boundary: a hook that fails has given the backend no secret)
        return {}


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
    """Texts in raw options whose name says that they are secret, whatever type the config gives them."""
    if isinstance(value, str) and _SENSITIVE.search(name):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _sensitive_texts(entry, str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _sensitive_texts(entry, name)
