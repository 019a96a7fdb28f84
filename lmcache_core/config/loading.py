"""Loads and validates configuration: one error for the first fault, saying where, what and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from lmcache_core.config.document import Document, read_document
from lmcache_core.config.faults import NOWHERE, Fault, Origin, Place, decode_value, explain, unknown_key
from lmcache_core.config.schema import CacheConfig
from lmcache_core.config.types import describe
from lmcache_core.errors import ConfigError

S = TypeVar("S")


def load_config(source: Path | str | Mapping[str, object]) -> CacheConfig:
    """The configuration in a YAML file, or in a mapping of the same shape. Reads nothing else.

    Plugins are not looked up: their options are validated when the tiers are built, or by
    `lmcache-core config check`.

    Raises:
        ConfigError: the file can't be read or holds something that isn't understood.
    """
    if isinstance(source, Mapping):
        document = Document(dict(source))
    else:
        if isinstance(source, str) and "\n" in source:
            raise ConfigError("load_config takes a file's path or a mapping, not the YAML text itself")
        document = read_document(Path(source), example="tiers: ...")
    try:
        config = _convert(document.value, CacheConfig, ())
    except Fault as fault:
        raise fault.as_error(document.origin) from None
    config.remember(document.origin)
    return config


def parse_options(
    config_class: type[S], options: Mapping[str, object], where: str | Place, origin: Origin = NOWHERE
) -> S:
    """A backend's options as its config class. `where` is their place, as text or as steps in `origin`.

    Unknown keys are refused whether or not the class forbids them.

    Raises:
        ConfigError: a key is unknown or missing, or a value isn't what its field takes.
    """
    try:
        return _convert(options, config_class, (where,) if isinstance(where, str) else where)
    except Fault as fault:
        raise fault.as_error(origin) from None


def _convert(document: Mapping[str, object], struct: type[S], place: Place) -> S:
    if not issubclass(struct, msgspec.Struct):
        raise Fault(place, f"{struct.__name__} is not a msgspec.Struct class")
    known = [field.encode_name for field in msgspec.structs.fields(struct)]
    for key in document:
        if not isinstance(key, str):
            raise Fault(place, f"the key {describe(key)} is not text")
        if key not in known:
            raise unknown_key(known, place, key)
    try:
        converted: S = msgspec.convert(dict(document), struct, dec_hook=decode_value)
        return converted
    except msgspec.ValidationError as error:
        fault = explain(error, document, struct)
        raise Fault((*place, *fault.place), str(fault)) from error
