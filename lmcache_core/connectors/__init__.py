"""Connectors: one subpackage a host engine, which speaks that host's API and nothing else.

Each needs its host's packages, which an extra of this distribution brings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_core.errors import ConfigError


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Inside it, importing a package that isn't installed says how to install it.

    Raises:
        ConfigError: a package of another project is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lmcache_core"):  # a fault of ours, which no installation mends
            raise
        raise ConfigError(
            f"{package} is not installed, which this needs: pip install 'lmcache-core[{extra}]'"
        ) from error
