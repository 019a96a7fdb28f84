"""What can be configured, told to people and editors: a JSON schema and tables of options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from msgspec import inspect

from lmcache_core.config.faults import alternatives, choices, description
from lmcache_core.config.schema import CacheConfig
from lmcache_core.config.types import ByteSize, Duration

_SCALARS: dict[type[inspect.Type], tuple[str, str]] = {
    inspect.BoolType: ("boolean", "true or false"),
    inspect.IntType: ("integer", "whole number"),
    inspect.FloatType: ("number", "number"),
    inspect.StrType: ("string", "text"),
    inspect.NoneType: ("null", "nothing"),
}
_NUMBER = r"^\s*[0-9]{1,19}(\.[0-9]{1,9})?\s*"
_CUSTOM: dict[type, tuple[dict[str, object], str]] = {
    ByteSize: (
        {
            "type": ["integer", "string"],
            "minimum": 0,
            "pattern": _NUMBER + r"(([KkMmGgTt][Ii]?)?[Bb])?\s*$",
        },
        "size",
    ),
    Duration: (
        {"type": ["number", "string"], "minimum": 0, "pattern": _NUMBER + r"([UuMm]?[Ss]|[MmHhDd])?\s*$"},
        "duration",
    ),
    Path: ({"type": "string", "pattern": r"^[^$]+$"}, "path"),
}
"""What an editor can check of each, and its name. A pattern judges text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of a reference table. `default` is as a config file would write it; None: required."""

    name: str
    kind: str
    default: str | None
    description: str


def option_table(struct: type[msgspec.Struct]) -> list[Option]:
    """Every key of `struct`, nested ones by their dotted name, in the order of the class."""
    return list(_rows(_struct_type(struct), ""))


def json_schema() -> dict[str, object]:
    """The JSON schema (draft 2020-12) of a config file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lmcache-core configuration",
        **_schema(_struct_type(CacheConfig)),
    }


def _struct_type(struct: type[msgspec.Struct]) -> inspect.StructType:
    return cast(inspect.StructType, inspect.type_info(struct))


def _rows(owner: inspect.StructType, prefix: str) -> Iterator[Option]:
    for field in owner.fields:
        name = prefix + field.encode_name
        nested = [kind for kind in alternatives(field.type) if isinstance(kind, inspect.StructType)]
        if nested:
            yield from _rows(nested[0], f"{name}.")
            continue
        yield Option(
            name=name,
            kind=_kind(field.type),
            default=None if field.required else _written(_default(field)),
            description=description(field.type),
        )


def _kind(field_type: inspect.Type) -> str:
    if choices(field_type):
        return " or ".join(f"`{choice}`" for choice in choices(field_type))
    words = []
    for kind in alternatives(field_type):
        if isinstance(kind, inspect.CustomType):
            words.append(_CUSTOM.get(kind.cls, ({}, kind.cls.__name__.lower()))[1])
        elif isinstance(kind, inspect.ListType):
            words.append(f"list of {_kind(kind.item_type)}")
        elif isinstance(kind, inspect.DictType):
            words.append("mapping")
        elif not isinstance(kind, inspect.NoneType):
            words.append(_SCALARS.get(type(kind), ("", type(kind).__name__))[1])
    return " or ".join(words)


def _default(field: inspect.Field) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return cast(object, field.default_factory())


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, ByteSize | Duration | Path | int | float):
        return str(value)
    if isinstance(value, str):
        return value or '""'
    return "{}" if value == {} else "[]" if value == [] else repr(value)


def _schema(kind: inspect.Type) -> dict[str, object]:
    if isinstance(kind, inspect.Metadata):
        return {**_schema(kind.type), **(kind.extra_json_schema or {})}
    if isinstance(kind, inspect.UnionType):
        return {"anyOf": [_schema(choice) for choice in kind.types]}
    if isinstance(kind, inspect.StructType):
        return _object_schema(kind)
    if isinstance(kind, inspect.LiteralType):
        return {"enum": list(kind.values)}
    if isinstance(kind, inspect.ListType):
        bound = {} if kind.min_length is None else {"minItems": kind.min_length}
        return {"type": "array", "items": _schema(kind.item_type), **bound}
    if isinstance(kind, inspect.DictType):
        return {"type": "object"}
    if isinstance(kind, inspect.CustomType):
        return dict(_CUSTOM[kind.cls][0])
    return {"type": _SCALARS[type(kind)][0], **_bounds(kind)}


def _bounds(kind: inspect.Type) -> dict[str, object]:
    named = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    named |= {"multiple_of": "multipleOf", "min_length": "minLength", "max_length": "maxLength"}
    found = {keyword: getattr(kind, name, None) for name, keyword in named.items()}
    return {keyword: bound for keyword, bound in found.items() if bound is not None}


def _object_schema(kind: inspect.StructType) -> dict[str, object]:
    properties: dict[str, object] = {}
    for field in kind.fields:
        properties[field.encode_name] = schema = _schema(field.type)
        scalar = not any(isinstance(inner, inspect.StructType) for inner in alternatives(field.type))
        if not field.required and scalar and (value := _default(field)) is not None:
            schema["default"] = str(value) if isinstance(value, ByteSize | Duration) else value
    return {
        "type": "object",
        "description": (kind.cls.__doc__ or "").strip().split("\n", 1)[0],
        "properties": properties,
        "required": [field.encode_name for field in kind.fields if field.required],
        "additionalProperties": False,
    }
