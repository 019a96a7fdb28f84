"""What the real server shows at `/metrics`: hits by the tier they came from, and what they cost."""

from __future__ import annotations

import importlib
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from vllm_session import tokens

FOLDER = Path(__file__).parents[2] / "benchmarks/vllm"
PROMPT = tokens(700, seed=51)
OTHERS = [tokens(700, seed=52 + i) for i in range(3)]
SAMPLE = re.compile(r"^(?P<name>[a-z_:]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def servers() -> Iterator[ModuleType]:
    """How the benchmarks start vLLM's server on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("servers")
    sys.modules.pop("servers", None)


@pytest.fixture(scope="module")
def server(servers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    model = servers.save_model(folder / "model", "tiny")
    near = {"name": "near", "backend": "cpu", "capacity": "1792KiB"}  # two prompts, but not three
    transfer = servers.ours([near, {**servers.disk(folder / "kv"), "name": "local"}])
    with servers.vllm(model, folder / "log", transfer, "--no-enable-prefix-caching") as url:
        yield url


def complete(url: str, prompt: list[int]) -> int:
    """The number of tokens that were cached."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def samples(url: str) -> dict[tuple[str, str], float]:
    """(name without prefix and `_total`, tier or source) → value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        [place] = re.findall(r'(?:tier|source)="([^"]*)"', labels) or [""]
        found[name.removesuffix("_total").removeprefix("vllm:"), place] = float(value)
    return found


def test_the_server_s_metrics_say_which_tiers_hits_came_from(server: str) -> None:
    assert complete(server, PROMPT) == 0
    assert complete(server, PROMPT) == 640
    for other in OTHERS:  # which push it out of memory
        assert complete(server, other) == 0
    assert complete(server, PROMPT) == 640
    seen = samples(server)
    assert seen["lmcache_core_hit_tokens", "near"] == 640
    assert seen["lmcache_core_hit_tokens", "local"] == 640
    assert seen["prompt_tokens_cached_by_source", "host"] == 640
    assert seen["prompt_tokens_cached_by_source", "disk"] == 640
    assert seen["prompt_tokens_cached_by_source", "external_unspecified"] == 0
    assert seen["external_prefix_cache_hits", ""] == 1280
    assert seen["lmcache_core_loaded_tokens", ""] == 1280
    assert seen["lmcache_core_stored_tokens", ""] == 4 * 640
    assert seen["lmcache_core_lost_tokens", ""] == 0
    assert seen["lmcache_core_prefetched_bytes", "local"] >= 640 * 1024
    assert ("lmcache_core_shed_stores", "near") not in seen
    for what in ("load_seconds", "store_seconds", "prefetch_seconds", "loaded_bytes", "stored_bytes"):
        assert seen[f"lmcache_core_{what}", ""] > 0
