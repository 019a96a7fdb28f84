"""Finds installed plugins, each loaded by itself, and tells what is wrong with those that can't be used."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pluggy

from lmcache_core.errors import PluginError
from lmcache_core.registry import hookspecs
from lmcache_core.registry.specs import BackendSpec, PluginInfo, PluginState
from lmcache_core.storage.contract import API, Backend

if TYPE_CHECKING:
    import click

BackendClass = type[Backend[Any]]  # each backend has its own config class
T = TypeVar("T")

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9-]*")

LIKE = 0.7
"""How alike a name must be to be suggested: `stores` for `store`, but not `disk` for `redis`."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What one entry point gave: its backends with their state, and its commands."""

    backends: tuple[tuple[PluginInfo, BackendSpec], ...] = ()
    problem: PluginInfo | None = None
    commands: tuple[click.Command, ...] = ()
    others: tuple[PluginInfo, ...] = ()


class Registry:
    """The plugins of this process: which backends can be used, and why the others can't.

    Not thread-safe while being added to; reading is.
    """

    def __init__(self) -> None:
        self._plugins: list[PluginInfo] = []
        self._specs: dict[str, BackendSpec] = {}
        self._classes: dict[str, BackendClass] = {}
        self._commands: list[click.Command] = []

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin found or added, sorted by name."""
        return tuple(sorted(self._plugins, key=lambda plugin: (plugin.name, plugin.distribution)))

    @property
    def commands(self) -> tuple[click.Command, ...]:
        """Command-line commands that plugins offer."""
        return tuple(self._commands)

    def add(self, spec: BackendSpec, backend_class: BackendClass | None = None) -> None:
        """Adds a backend by hand: for programs and tests that don't install a distribution.

        With `backend_class` the target is not imported.

        Raises:
            PluginError: a usable backend of that name is there, or the spec's api doesn't fit.
        """
        if spec.name in self._specs:
            raise PluginError(f"a backend named {spec.name!r} is already registered")
        state, cause = _api_state(spec.api)
        if state is not PluginState.OK:
            raise PluginError(f"backend {spec.name!r}: {cause}")
        if backend_class is not None:
            _check_class(spec, backend_class, "correct the class")
            self._classes[spec.name] = backend_class
        self._specs[spec.name] = spec
        self._plugins.append(
            PluginInfo(name=spec.name, distribution="(added)", version="", api=spec.api, state=state)
        )

    def backend(self, name: str) -> BackendSpec:
        """The spec of a usable backend.

        Raises:
            PluginError: it is broken, offered twice or too new (says the cause), or nothing offers it
                (says the nearest name).
        """
        spec = self._specs.get(name)
        if spec is not None:
            return spec
        unusable = [plugin for plugin in self.plugins if plugin.name == name and plugin.cause]
        if unusable:
            plugin = unusable[0]
            raise PluginError(f"plugin {name!r} can't be used ({plugin.state.value}): {plugin.cause}")
        for plugin in self.plugins:
            if plugin.name == name:
                raise PluginError(
                    f"the plugin {name!r} ({plugin.distribution}) is installed, but it offers no backend; "
                    f"{self._installed()}"
                )
        raise PluginError(self._unknown(name))

    def load(self, name: str) -> BackendClass:
        """Imports a backend's class (and with it, usually, its driver); later calls return it again.

        Raises:
            PluginError: as `backend`; or the target can't be imported, or isn't what its spec says.
        """
        spec = self.backend(name)
        if name not in self._classes:
            self._classes[name] = _import_class(spec, self._remedy(name))
        return self._classes[name]

    def checked(self) -> tuple[PluginInfo, ...]:
        """`plugins`, after importing every usable backend: one that fails is listed as broken."""
        return tuple(self._checked(plugin) for plugin in self.plugins)

    def _checked(self, plugin: PluginInfo) -> PluginInfo:
        if plugin.state is not PluginState.OK or plugin.name not in self._specs:
            return plugin
        try:
            self.load(plugin.name)
        except PluginError as error:
            return replace(plugin, state=PluginState.BROKEN, cause=str(error))
        return plugin

    def _unknown(self, name: str) -> str:
        names = sorted(self._specs)
        parts = [f"no installed plugin offers a backend named {name!r}"]
        close = get_close_matches(name, names, n=1, cutoff=LIKE)
        if close:
            parts.append(f"did you mean {close[0]!r}?")
        parts.append(self._installed())
        if failed := sum(plugin.state is not PluginState.OK for plugin in self.plugins):
            parts.append(f"`lmcache-core plugins` lists {failed} more that can't be used")
        if not close and _PACKAGE.fullmatch(name):  # else it is nothing to type after a command
            parts.append(f"a published one is installed by name, such as `pip install lmcache-core-{name}`")
        return "; ".join(parts)

    def _installed(self) -> str:
        return f"installed backends: {', '.join(sorted(self._specs)) or 'none'}"

    def _remedy(self, name: str) -> str:
        """What to do about a usable plugin whose backend turns out not to be."""
        found = [plugin.distribution for plugin in self.plugins if plugin.name == name and plugin.version]
        return f"reinstall or upgrade {found[0]}, or tell its author" if found else "correct its BackendSpec"

    def _take(self, loaded: Iterable[_Loaded]) -> None:
        offers: dict[str, list[tuple[PluginInfo, BackendSpec]]] = defaultdict(list)
        for plugin in loaded:
            self._commands.extend(plugin.commands)
            self._plugins.extend(plugin.others)
            if plugin.problem is not None:
                self._plugins.append(plugin.problem)
            for info, spec in plugin.backends:
                offers[spec.name].append((info, spec))
        for name, offered in offers.items():
            if len(offered) > 1:
                self._plugins.extend(_duplicate(info, [other for other, _ in offered]) for info, _ in offered)
                continue
            info, spec = offered[0]
            self._plugins.append(info)
            if info.state is PluginState.OK:
                self._specs[name] = spec


def discover() -> Registry:
    """Loads every entry point of the group `lmcache_core`, each by itself. Imports no driver.

    Never raises for a plugin's sake: what is wrong with one stands in `Registry.plugins`.
    """
    registry = Registry()
    found = sorted(entry_points(group=hookspecs.PROJECT), key=lambda point: (point.name, point.value))
    registry._take(_load(point) for point in found)
    return registry


def _load(point: EntryPoint) -> _Loaded:
    distribution = point.dist.name if point.dist is not None else "(unknown)"
    version = point.dist.version if point.dist is not None else ""

    def info(name: str, api: tuple[int, int] | None, state: PluginState, cause: str = "") -> PluginInfo:
        return PluginInfo(
            name=name, distribution=distribution, version=version, api=api, state=state, cause=cause
        )

    try:
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        plugin = point.load()
        manager.register(plugin)
        if not manager.get_hookcallers(plugin):
            raise PluginError("it implements no lmcache_core hook (is `@hookimpl` missing?)")
        manager.check_pending()
        specs = _flat(manager.hook.lmcache_backends(), BackendSpec)
        _check_named_for(point.name, specs)
        commands = _commands(manager)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (recorded boundary: plugins are foreign code)
        cause = f"{type(error).__name__}: {error}" if not isinstance(error, PluginError) else str(error)
        upgrade = f"; reinstall or upgrade {distribution}"
        return _Loaded(problem=info(point.name, None, PluginState.BROKEN, cause + upgrade))
    backends = tuple((info(spec.name, spec.api, *_api_state(spec.api)), spec) for spec in specs)
    others = () if backends else (info(point.name, None, PluginState.OK),)
    return _Loaded(backends=backends, commands=commands, others=others)


def _check_named_for(name: str, specs: Sequence[BackendSpec]) -> None:
    """A plugin that can't be loaded is known by its entry point alone, so that must name a backend of it."""
    names = [spec.name for spec in specs]
    if names and name not in names:
        offered = ", ".join(map(repr, names))
        raise PluginError(
            f"its entry point is named {name!r} but offers {offered}: they must have the same name"
        )


def _commands(manager: pluggy.PluginManager) -> tuple[click.Command, ...]:
    if not manager.hook.lmcache_commands.get_hookimpls():
        return ()
    import click  # only a plugin with commands needs it

    return _flat(manager.hook.lmcache_commands(), click.Command)


def _flat(results: list[object], kind: type[T]) -> tuple[T, ...]:
    items: list[T] = []
    for result in results:
        if not isinstance(result, list | tuple):
            raise PluginError(f"a hook returned {type(result).__name__}, not a list of {kind.__name__}")
        items.extend(result)
    for item in items:
        if not isinstance(item, kind):
            raise PluginError(f"a hook returned a {type(item).__name__} where a {kind.__name__} belongs")
    return tuple(items)


def _api_state(api: tuple[int, int]) -> tuple[PluginState, str]:
    ours = f"{API[0]}.{API[1]}"
    if api[0] == API[0] and api[1] <= API[1]:
        return PluginState.OK, ""
    written_for = f"written for contract {api[0]}.{api[1]}, this core speaks {ours}"
    if api > API:
        return (
            PluginState.TOO_NEW,
            f"{written_for}: upgrade lmcache-core, or install an older release of the plugin",
        )
    return PluginState.BROKEN, f"{written_for}: upgrade the plugin"


def _duplicate(info: PluginInfo, all_offers: list[PluginInfo]) -> PluginInfo:
    offered_by = ", ".join(sorted({f"{offer.distribution} {offer.version}".strip() for offer in all_offers}))
    cause = f"the name is offered more than once, by {offered_by}: uninstall all but one"
    return replace(info, state=PluginState.DUPLICATE, cause=cause)


def _import_class(spec: BackendSpec, remedy: str) -> BackendClass:
    module_name, _, attribute = spec.target.partition(":")
    try:
        backend_class = getattr(import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # recorded boundary: plugins are foreign code
        cause = f"{type(error).__name__}: {error}"
        todo = f"try: {spec.install_hint}" if spec.install_hint else remedy
        raise PluginError(
            f"backend {spec.name!r} can't be imported from {spec.target}: {cause}; {todo}"
        ) from error
    _check_class(spec, backend_class, remedy)
    checked: BackendClass = backend_class
    return checked


def _check_class(spec: BackendSpec, backend_class: object, remedy: str) -> None:
    fault = _class_fault(backend_class)
    if fault:
        raise PluginError(f"backend {spec.name!r}: {spec.target}{fault}; {remedy}")


def _class_fault(backend_class: object) -> str:
    if not isinstance(backend_class, type) or not issubclass(backend_class, Backend):
        return " is not a subclass of lmcache_core.sdk.Backend"
    if inspect.isabstract(backend_class):
        return f" does not implement {', '.join(sorted(backend_class.__abstractmethods__))}"
    config_class = getattr(backend_class, "config_class", None)
    if not isinstance(config_class, type) or not issubclass(config_class, msgspec.Struct):
        return ".config_class is not a msgspec.Struct class"
    return ""
