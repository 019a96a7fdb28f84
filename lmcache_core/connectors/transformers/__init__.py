"""Hugging Face Transformers (5.x): generate with the KV of known prefixes loaded instead of computed.

Importing this imports torch and transformers.
"""

from __future__ import annotations

from lmcache_core.connectors.transformers.generator import CachedGenerator, identify
from lmcache_core.connectors.transformers.run import Generation, PromptReport

__all__ = ["CachedGenerator", "Generation", "PromptReport", "identify"]
