"""The plugins: hooks they implement, specs they return, and which of them can be used."""

from lmcache_core.registry.discovery import Registry, discover
from lmcache_core.registry.hookspecs import hookimpl
from lmcache_core.registry.specs import BackendSpec, PluginInfo, PluginState

__all__ = ["BackendSpec", "PluginInfo", "PluginState", "Registry", "discover", "hookimpl"]
