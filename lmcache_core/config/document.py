"""Reads a YAML file into plain values and remembers the line of each; refuses what a config never needs."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import yaml

from lmcache_core.config.faults import NOWHERE, Origin, Place
from lmcache_core.errors import ConfigError

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 32
_NOT_SHOWN = re.compile(r"[^\x20-\x7e]+")
_MISREAD = (
    ("int", re.compile(r"[-+]?0[0-9_]+"), "an octal number (010 is 8)"),
    ("int", re.compile(r".*:.*"), "a number of base 60 (1:30 is 90)"),
    ("float", re.compile(r".*:.*"), "a number of base 60 (1:30 is 90)"),
    ("float", re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE), "infinity, or no number"),
    ("timestamp", re.compile(r".*", re.DOTALL), "a date"),
    ("merge", re.compile(r"<<"), "a word of its own"),
    ("value", re.compile(r"="), "a word of its own"),
)
"""Plain values that YAML 1.1 silently takes for something else: tag, text, and what for."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file's top-level mapping, and where each value's key (or list entry) stands."""

    value: dict[str, object]
    origin: Origin = NOWHERE


def read_document(path: Path, *, example: str = "key: value") -> Document:
    """Reads a config file; every fault is one ConfigError that names the file.

    `example` is a line that such a file may hold, for messages.

    Raises:
        ConfigError: missing, unreadable, too large, not UTF-8, not YAML, empty, not a mapping; or it
            uses aliases, tags, several documents, duplicate keys, nesting beyond MAX_DEPTH or values that
            YAML reads as other ones.
    """
    return parse_document(_read_text(path), str(path), example=example)


def parse_document(text: str, source: str, *, example: str = "key: value") -> Document:
    """As `read_document`, from text already read."""
    try:
        _refuse_exotic(text, source)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Place, int] = {}
        if root is not None:
            _walk(root, (), lines, source)
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_yaml_fault(error, source)) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as a number of a thousand digits
        detail = _NOT_SHOWN.sub(" ", str(error))
        raise ConfigError(f"{source}: not readable as YAML: {detail}") from error
    if value is None:
        raise ConfigError(f"{source}: the file is empty; it must hold a mapping (`{example}`)")
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: the file must hold a mapping (`{example}`), not {_kind(value)}")
    return Document(value, Origin(source, lines))


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ConfigError(f"{path}: can't be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES // 1024} KiB; this can't be a config file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _refuse_exotic(text: str, source: str) -> None:
    """Walks the parse events, which nothing has expanded yet, so that no bomb ever goes off."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ConfigError(
                f"{source}, line {line}: anchors and aliases (& and *) are not allowed; write it out"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            named = (
                f" ({tag})" if tag.startswith("tag:") else ""
            )  # else it may be a password that begins with !
            message = f"tags{named} are not allowed; write a plain value, or put it in quotes"
            raise ConfigError(f"{source}, line {line}: {message}")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(f"{source}, line {line}: a second document begins; a config file is one")
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ConfigError(f"{source}, line {line}: nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], source: str) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        for tag, text, what in _MISREAD:
            if node.tag == f"tag:yaml.org,2002:{tag}" and text.fullmatch(node.value):  # it may be a password
                message = (
                    f"YAML takes this for {what}; write a plain number, or put it in quotes to keep it text"
                )
                raise ConfigError(Origin(source, lines).located(place, message))
    elif isinstance(node, yaml.SequenceNode):
        for position, entry in enumerate(node.value):
            _walk(entry, (*place, position), lines, source)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[Hashable, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                message = f"{shown} is not a text key; put it in quotes or correct it"
                raise ConfigError(Origin(source, {place: line}).located(place, message))
            if key.value in seen:
                message = f"the key {key.value!r} is here twice, first on line {seen[key.value]}; remove one"
                raise ConfigError(Origin(source, {place: line}).located(place, message))
            seen[key.value] = line
            lines[(*place, key.value)] = line
            _walk(value, (*place, key.value), lines, source)


def _yaml_fault(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{source}, line {mark.line + 1}" if mark is not None else source
    problem = " ".join(part for part in (error.context, error.problem) if part)
    hint = "; indent with spaces, not tabs" if "\\t" in problem else ""
    return f"{where}: not valid YAML: {problem}{hint}"


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "a single value"
