"""When the installed vLLM names images by numbers in place of hashes, and what else of its options counts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import itertools, json
from types import SimpleNamespace
from vllm.config import ModelConfig, MultiModalConfig
from vllm.renderers.base import BaseRenderer
from lmcache_core.connectors.vllm import support

def vllm_s(cache_gb, prefix_caching):
    images = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    model = SimpleNamespace(multimodal_config=images)
    return model, cache, images

def numbered(*said):
    model, cache, _ = vllm_s(*said)
    renderer = SimpleNamespace(
        model_config=model, config=SimpleNamespace(cache_config=cache), _validate_mm_uuids=lambda *each: None
    )
    one = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    return bool(BaseRenderer._process_mm_uuids(renderer, {}, one, {}, "request"))

def refused(*said):
    _, cache, images = vllm_s(*said)
    return not support._hashes_images(images, cache)

said = list(itertools.product((0, 4), (False, True)))
print("@@" + json.dumps({
    "numbered": [numbered(*each) for each in said],
    "refused": [refused(*each) for each in said],
    "images": sorted(MultiModalConfig.__dataclass_fields__),
    "model": sorted(ModelConfig.__dataclass_fields__),
}))
"""


@pytest.fixture(scope="module")
def seen() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=150, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("@@"))


def test_what_is_refused_is_where_vllm_numbers_images(seen: Any) -> None:
    """In the order of cache sizes 0 and 4, and without and with prefix caching."""
    assert seen["refused"] == seen["numbered"] == [True, False, False, False]


def test_the_options_that_name_a_model_are_vllm_s(seen: Any) -> None:
    read = {"mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"}
    assert {*read, "mm_encoder_attn_dtype", "language_model_only"} <= set(seen["images"])
    assert {"multimodal_config", "quantization_config"} <= set(seen["model"])
