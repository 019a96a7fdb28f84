"""Turns a refused value into one message: where in the file, what is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import msgspec
from msgspec import inspect

from lmcache_core.config.secrecy import is_named_like_a_secret, without_secrets
from lmcache_core.config.types import ByteSize, Duration, describe, path_from_config
from lmcache_core.errors import ConfigError

Place = tuple[str | int, ...]
"""Steps from the top of the document to a value: mapping keys and list positions."""

_LOCATED = re.compile(r"(?P<fault>.*) - at (?P<key>`key` in )?`(?P<path>\$[^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_OWN_CHECK = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.\w+|\[\d+\])*): (?P<fault>.*)", re.DOTALL)
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing (null)",
}


class Fault(Exception):
    """One thing wrong with a document, before its file and line are known."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place

    def as_error(self, origin: Origin) -> ConfigError:
        """The error a user sees."""
        return ConfigError(origin.located(self.place, str(self)))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a document comes from: its name, empty if it is no file, and the line of each place in it."""

    source: str = ""
    lines: Mapping[Place, int] = field(default_factory=dict)

    def located(self, place: Place, message: str = "") -> str:
        """`file, line 7: tiers[1].options: message`, as much of it as is known."""
        line = next(
            (self.lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in self.lines), None
        )
        file = f"{self.source}, line {line}" if self.source and line is not None else self.source
        return ": ".join(part for part in (file, spell(place), message) if part)


NOWHERE = Origin()
"""Of what was no file."""


def spell(place: Place) -> str:
    """A place as text: `tiers[1].options.path`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def decode_value(kind: type, value: object) -> object:
    """Reads a value of a type that YAML doesn't know (msgspec's `dec_hook`).

    A type takes part by a class method `from_config(value)` that raises ValueError.
    """
    if kind is object:
        return value
    if kind is Path:
        return path_from_config(value)
    from_config = getattr(kind, "from_config", None)
    if from_config is None:
        raise ValueError(f"the option's type {kind.__name__} can't be read from a config file")
    decoded: object = from_config(value)
    return decoded


def unknown_key(known: Sequence[str], place: Place, key: str) -> Fault:
    """The fault of a key that isn't one of `known`."""
    close = get_close_matches(key, known, n=1, cutoff=0.6)
    advice = f"did you mean {close[0]!r}? " if close else ""
    listed = f"known here: {', '.join(known)}" if known else "nothing can be set here"
    return Fault((*place, key), f"unknown key; {advice}{listed}")


def explain(error: msgspec.ValidationError, document: object, struct: type[msgspec.Struct]) -> Fault:
    """The fault behind `error`, which msgspec raised on reading `document` as `struct`.

    The message of a class's own check (`__post_init__`) may begin with the key it is about: `path: …`.
    """
    text, place, in_key = _split(str(error))
    if in_key:
        return Fault(place, "every key must be text; put it in quotes")
    kind = _type_at(inspect.type_info(struct), place)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL)
    owner = _struct_in(kind)
    if unknown and owner is not None:
        return unknown_key([field.encode_name for field in owner.fields], place, unknown[1])
    missing = re.fullmatch(r"Object missing required field `(.*)`", text, re.DOTALL)
    if missing:
        return Fault((*place, missing[1]), f"required key is missing; {_ask_for(owner, missing[1])}")
    own = _OWN_CHECK.fullmatch(text)
    if own and owner is not None:
        inner = _steps(f".{own['path']}")
        if inner[0] in [field.encode_name for field in owner.fields]:
            return Fault((*place, *inner), without_secrets(own["fault"], document))
    named = any(isinstance(step, str) and is_named_like_a_secret(step) for step in place)
    fault = _value_fault(text, _value_at(document, place), kind, hidden=named or _may_be_secret(kind))
    return Fault(place, without_secrets(fault, document))


def _split(message: str) -> tuple[str, Place, bool]:
    match = _LOCATED.fullmatch(message)
    if match is None:
        return message, (), False
    return match["fault"], _steps(match["path"]), match["key"] is not None


def _steps(path: str) -> Place:
    """The place that msgspec spells as `$.tiers[1].name`."""
    return tuple(int(position) if position else name or "..." for name, position in _STEP.findall(path))


def _ask_for(owner: inspect.StructType | None, name: str) -> str:
    field = next((f for f in owner.fields if f.encode_name == name), None) if owner is not None else None
    meaning = description(field.type) if field is not None else ""
    return f"add `{name}: ...`" + (f" ({meaning.rstrip('.')})" if meaning else "")


def _value_fault(text: str, value: object, kind: inspect.Type | None, *, hidden: bool) -> str:
    shown = "something else" if hidden else describe(value)
    wrong_type = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", text)
    if wrong_type:
        wanted = wrong_type[1].split(" | ")
        if allowed := choices(kind):
            return f"expected one of {', '.join(allowed)}, got {shown}"
        expected = " or ".join(_KINDS.get(name, name) for name in wanted)
        return f"expected {expected}, got {shown}{_hint(wanted, value)}"
    if text.startswith("Invalid enum value"):
        allowed = choices(kind)
        close = get_close_matches(str(value), allowed, n=1, cutoff=0.5)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        return f"{shown} is not one of {', '.join(allowed)}{advice}"
    length = re.fullmatch(r"Expected `(array|object)` of length >= (\d+)", text)
    if length and isinstance(value, list | tuple | dict):
        return f"expected at least {length[2]} entry, got {len(value)}"
    bound = re.fullmatch(r"Expected `([^`]*)` (.*)", text, re.DOTALL)
    if bound:
        return f"expected {_KINDS.get(bound[1], bound[1])} {bound[2]}, got {shown}"
    return text


def _hint(wanted: list[str], value: object) -> str:
    if "str" in wanted and isinstance(value, bool | int | float):
        return "; put it in quotes to keep it text"
    if value is None:
        return "; give it a value or remove the key"
    return ""


def _value_at(document: object, place: Place) -> object:
    value = document
    for step in place:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def _type_at(kind: inspect.Type | None, place: Place) -> inspect.Type | None:
    for step in place:
        owner = _struct_in(kind)
        if owner is not None and isinstance(step, str):
            kind = next((field.type for field in owner.fields if field.encode_name == step), None)
        else:
            kind = next((found for inner in alternatives(kind) if (found := _element(inner))), None)
    return kind


def _element(kind: inspect.Type) -> inspect.Type | None:
    element: inspect.Type | None = getattr(kind, "item_type", None) or getattr(kind, "value_type", None)
    return element


def _struct_in(kind: inspect.Type | None) -> inspect.StructType | None:
    return next((inner for inner in alternatives(kind) if isinstance(inner, inspect.StructType)), None)


def alternatives(kind: inspect.Type | None) -> list[inspect.Type]:
    """The types a value may have, without the annotations around them."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        return [inner for choice in kind.types for inner in alternatives(choice)]
    return [] if kind is None else [kind]


def description(kind: inspect.Type) -> str:
    """What `Meta(description=...)` says about a field's type; empty when nothing does."""
    while isinstance(kind, inspect.Metadata):
        found = (kind.extra_json_schema or {}).get("description")
        if found:
            return str(found)
        kind = kind.type
    return ""


def choices(kind: inspect.Type | None) -> list[str]:
    """The values a literal or enum type allows."""
    found: list[str] = []
    for inner in alternatives(kind):
        if isinstance(inner, inspect.LiteralType):
            found.extend(str(value) for value in inner.values)
        elif isinstance(inner, inspect.EnumType):
            found.extend(str(member.value) for member in inner.cls)
    return found


def _may_be_secret(kind: inspect.Type | None) -> bool:
    """Whether a value of this type must stay out of messages: any type of a plugin's own might hide one."""
    for inner in alternatives(kind):
        if isinstance(inner, inspect.CustomType) and inner.cls not in (ByteSize, Duration, Path, object):
            return True
        if _may_be_secret(_element(inner)):
            return True
    return False
