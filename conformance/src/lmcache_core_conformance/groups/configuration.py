"""Configuration and keys: options are judged before anything happens, and secrets stay secret."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from lmcache_core.config import parse_options
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.sdk import Secret
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.timing import deadline_of
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, check

_NONSENSE: tuple[object, ...] = ({"no such": {"thing": 1}}, [["nothing", "here"]], "\0", -3.5)


class Configuration(Group):
    group = "configuration"

    def test_an_unknown_option_is_refused_with_the_nearest_name(self) -> None:
        """A misspelt option that is ignored leaves its default in force, and nobody learns why."""
        place = self.bench.place()
        kind = inspect.type_info(self.bench.backend_class.config_class)
        assert isinstance(kind, inspect.StructType)
        for path, name in [((), "no-such-option"), *_misspelt(kind)]:
            refusal = self._refusal(_set(place.options, (*path, name), 1))
            check(refusal is not None, f"the unknown option {'.'.join((*path, name))} was accepted")
            check(name in str(refusal), f"the refusal of {name} does not name it: {refusal}")
            if name != "no-such-option":
                near = name.replace("zz", "")
                check(near in str(refusal), f"the refusal of {name} does not say {near}: {refusal}")

    def test_an_ill_typed_option_is_refused_before_any_io(self) -> None:
        """What only fails at the first store is found out in production instead of at start."""
        place = self.bench.place()
        before = sorted(place.directory.rglob("*"))
        for field in msgspec.structs.fields(self.bench.backend_class.config_class):
            name = field.encode_name
            refusals = [self._refusal({**place.options, name: nonsense}) for nonsense in _NONSENSE]
            told = [refusal for refusal in refusals if refusal is not None]
            check(told, f"option {name} takes anything: give it the type that open needs")
            check(name in str(told[0]), f"the refusal of an ill-typed {name} does not name it: {told[0]}")
        check(sorted(place.directory.rglob("*")) == before, "files were made while options were refused")

    def test_secrets_are_never_shown(self) -> None:
        """Logs and bug reports are passed on: one repr of a config is enough to give a store away."""
        place = self.bench.place()
        config_class = self.bench.backend_class.config_class
        config = parse_options(config_class, place.options, "conformance")
        secrets = list(_secrets(config))
        if not secrets:
            if not self.bench.capabilities.authenticated:
                raise NotApplicable("capability authenticated is False, and no option is a Secret")
            check(False, "the backend is authenticated, and no option of it is a Secret")
        shown = [repr(config), str(config)]
        with _logged() as log:
            store = self.bench.open(place)
            key = key_named("secret")
            self.put(store, key, value_of(key, 1, PAGE))
            store.get(key_named("absent"), PAGE)
            shown += [repr(store.backend), str(store.stats())]
            store.close()
            with contextlib.suppress(Unproven):
                wrong = self.bench.harness.wrong_credentials(place.directory)
                secrets += _secrets(parse_options(config_class, wrong, "conformance"))
                shown.append(self._failed_open(wrong))
        for secret in secrets:
            for text in (*shown, *log):
                check(secret not in text, "a secret stands in a repr, an error or a log line")

    def test_everything_that_leaves_the_backend_pickles(self) -> None:
        """Configurations, outcomes and errors cross process borders: a lock or socket in one stops there."""
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("pickled")
        self.put(store, key, value_of(key, 1, self.bench.fit(2)))
        things: list[object] = [
            parse_options(self.bench.backend_class.config_class, place.options, "conformance"),
            store.capabilities,
            store.stats(),
            store.put(key, value_of(key, 2, self.bench.fit(2))),
            store.get(key, 2 * PAGE).outcome,
            store.get(key, PAGE).outcome,
            store.get(key_named("absent"), PAGE).outcome,
        ]
        if self.bench.capabilities.scan:
            things.append(list(store.scan_page("", None, 10).entries))
        with deadline_of(store, -1.0):
            things += [
                outcome.error for outcome in (store.put(key, value_of(key, 3, PAGE)),) if outcome.error
            ]
        for thing in things:
            seen = _pickled(thing)
            if not isinstance(thing, LMCacheError) and getattr(thing, "error", None) is None:
                check(seen == thing, f"{thing!r} is another one after pickling: {seen!r}")
            else:
                check(str(seen) == str(thing), f"{thing!r} says something else after pickling: {seen!r}")

    # -- what these properties share -------------------------------------------------------------

    def _refusal(self, options: Mapping[str, object]) -> ConfigError | None:
        try:
            backend = self.bench.harness.build(options)
        except ConfigError as error:
            return error
        backend.close()
        return None

    def _failed_open(self, options: Mapping[str, object]) -> str:
        """What is shown when a store is opened with these options, which should fail."""
        backend = self.bench.harness.build(options)
        host = self.bench.host(backend)
        try:
            backend.open(host)
        except Exception as error:  # noqa: BLE001 (recorded boundary: the backend is foreign code)
            return f"{error!r} {error} {backend!r}"
        finally:
            backend.close()
            host.close()
        return repr(backend)


def _misspelt(kind: inspect.StructType) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of options with letters too many, and the path to each: those of nested structs too."""
    for field in kind.fields:
        yield (), f"{field.encode_name}zz"
        if isinstance(field.type, inspect.StructType):
            for path, name in _misspelt(field.type):
                yield (field.encode_name, *path), name


def _set(options: Mapping[str, object], path: tuple[str, ...], value: object) -> dict[str, object]:
    """A copy of `options` with `value` at `path`."""
    changed, name = dict(options), path[0]
    if len(path) == 1:
        changed[name] = value
    else:
        inner = changed.get(name)
        changed[name] = _set(inner if isinstance(inner, dict) else {}, path[1:], value)
    return changed


def _secrets(config: object) -> Iterator[str]:
    """The texts of all secrets in a config."""
    if isinstance(config, Secret):
        yield config.reveal()
    elif isinstance(config, msgspec.Struct):
        for name in config.__struct_fields__:
            yield from _secrets(getattr(config, name))
    elif isinstance(config, list | tuple):
        for entry in config:
            yield from _secrets(entry)
    elif isinstance(config, dict):
        yield from _secrets(list(config.values()))


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What is logged meanwhile, at every level."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    root, handler = logging.getLogger(), Keep()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def _pickled(thing: Any) -> Any:
    return _must(lambda: pickle.loads(pickle.dumps(thing)), f"{thing!r} can't be pickled")  # noqa: S301 (its own)


def _must(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (pickle raises whatever the object's own code raises)
        check(False, f"{what}: {type(error).__name__}: {error}")
