"""vLLM (0.32): prompts whose KV is known are loaded into its paged blocks instead of computed.

Importing this imports neither vLLM nor torch. vLLM finds the connector by its name, which the entry point
`vllm.general_plugins` registers, or under this module's path (`kv_connector_module_path`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector as LMCacheCoreConnector

NAME = "LMCacheCoreConnector"

__all__ = ["NAME", "register"]


def register() -> None:
    """Makes `"kv_connector": "LMCacheCoreConnector"` known to vLLM, which calls this in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", NAME)


def __getattr__(name: str) -> object:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector

    return LMCacheCoreConnector
