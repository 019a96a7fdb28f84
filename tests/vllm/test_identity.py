"""Other weights under one path share nothing; the connector loads by module path, and counts what it does."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm_session import Engine, Request, save_llama, tokens

PROMPT = Request(tokens(700, seed=5))


def test_other_weights_under_the_same_path_share_nothing(
    model: Path, plain: Engine, log: Path, tmp_path: Path
) -> None:
    served = tmp_path / "model"
    cache = {
        "tiers": [
            {"name": "cpu", "backend": "cpu", "capacity": "64MiB"},
            {
                "name": "disk",
                "backend": "disk",
                "capacity": "64MiB",
                "options": {"path": str(tmp_path / "kv")},
            },
        ]
    }
    shutil.copytree(save_llama(tmp_path / "fine-tune", seed=1), served)
    with Engine(served, log, cache) as engine:
        others = engine.generate(PROMPT, PROMPT)
        assert engine.generate(PROMPT)[0].cached == 640

    shutil.rmtree(served)
    shutil.copytree(model, served)
    by_path = {"kv_connector_module_path": "lmcache_core.connectors.vllm"}
    with Engine(served, log, cache, transfer=by_path, disable_log_stats=False) as engine:
        [mine] = engine.generate(PROMPT)
        assert mine.cached == 0
        assert mine.tokens == plain.generate(PROMPT)[0].tokens
        assert mine.tokens != others[0].tokens
        assert engine.generate(PROMPT)[0].cached == 640
        seen = engine.ask("metrics")
        assert seen["vllm:external_prefix_cache_hits"] == 640
        assert seen["vllm:lmcache_core_loaded_tokens"] == 640
        assert seen["vllm:lmcache_core_stored_tokens"] == 640
        assert seen["vllm:lmcache_core_loaded_bytes"] > 0
        assert seen["vllm:lmcache_core_lost_tokens"] == 0
