"""Harnesses of the command: made from a file of options, or found by name."""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from lmcache_core.config import ByteSize, Duration, parse_options
from lmcache_core.config.document import read_document
from lmcache_core.errors import ConfigError
from lmcache_core.storage.contract import Backend
from lmcache_core_conformance.harness import Harness

_PLACEHOLDER = "{tmp}"


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file given to `conformance run`. Its defaults are those of `Harness`."""

    options: dict[str, object] = {}
    """The backend's options; `{tmp}` in a text stands for a new, empty directory for each store."""
    unopenable: dict[str, object] | None = None
    """Options with which opening must fail, such as a forbidden directory or a closed port."""
    capacity: ByteSize = ByteSize(Harness.capacity_bytes)
    small_capacity: ByteSize = ByteSize(Harness.small_capacity_bytes)
    large_value: ByteSize = ByteSize(Harness.large_value_bytes)
    deadline: Duration = Duration(Harness.deadline_s)


class ConfiguredHarness(Harness):
    """A harness made from a file instead of a class."""

    def __init__(self, backend: type[Backend[Any]], config: RunConfig) -> None:
        self._backend_class = backend
        self._config = config
        self.capacity_bytes = config.capacity
        self.small_capacity_bytes = config.small_capacity
        self.large_value_bytes = config.large_value
        self.deadline_s = config.deadline

    @property
    def backend(self) -> type[Backend[Any]]:  # type: ignore[override]  # known only now
        return self._backend_class

    @property
    def has_placeholder(self) -> bool:
        """Whether each store gets options of its own."""
        return self.fresh_config(Path("one")) != self.fresh_config(Path("other"))

    def fresh_config(self, tmp: Path) -> Mapping[str, object]:
        return {name: _fill_in(value, tmp) for name, value in self._config.options.items()}

    def unopenable_config(self, tmp: Path) -> Mapping[str, object]:
        if self._config.unopenable is None:
            return super().unopenable_config(tmp)
        return {name: _fill_in(value, tmp) for name, value in self._config.unopenable.items()}


def configured_harness(backend: type[Backend[Any]], file: Path | None) -> ConfiguredHarness:
    """The harness that a file describes, or one without any options.

    Raises:
        ConfigError: the file can't be read, or isn't what `RunConfig` says.
    """
    document = {} if file is None else read_document(file).value
    return ConfiguredHarness(backend, parse_options(RunConfig, document, str(file)))


def harness_named(name: str) -> Harness:
    """The harness at `FILE.py:CLASS` or `MODULE:CLASS`, made without arguments.

    A file may import its neighbours, by their name or relatively: its folder is put on the import path.

    Raises:
        ConfigError: nothing is there, it can't be imported, or isn't a harness.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"--harness {name!r} is neither FILE.py:CLASS nor MODULE:CLASS")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, attribute, None)
        if found is None:
            names = [
                n for n, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, Harness)
            ]
            raise ConfigError(f"it has no {attribute!r}; its harnesses: {', '.join(names) or 'none'}")
        harness = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:  # recorded boundary: a user's module
        raise ConfigError(f"--harness {name!r} can't be used: {type(error).__name__}: {error}") from error
    if not isinstance(harness, Harness):
        raise ConfigError(f"--harness {name!r} is a {type(harness).__name__}, not a Harness")
    return harness


def _import_file(file: Path) -> ModuleType:
    """Imports a file as a module of its folder, so that both kinds of import of its neighbours work."""
    folder = file.absolute().parent
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    package = ModuleType(f"conformance_harness_{zlib.crc32(str(folder).encode()):08x}")
    package.__path__ = [str(folder)]
    sys.modules.setdefault(package.__name__, package)
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{package.__name__}.{file.stem}")


def _fill_in(value: object, tmp: Path) -> object:
    if isinstance(value, str):
        return value.replace(_PLACEHOLDER, str(tmp))
    if isinstance(value, list):
        return [_fill_in(entry, tmp) for entry in value]
    if isinstance(value, dict):
        return {key: _fill_in(entry, tmp) for key, entry in value.items()}
    return value
