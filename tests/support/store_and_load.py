"""A program for a fresh process: stores KV of 1000 tokens through an engine, or loads and checks it."""

from __future__ import annotations

PROGRAM = """
import sys
from array import array
from lmcache_core import CacheEngine, ModelRecord, Part, load_config

LAYERS, NBYTES = 2, 32
config = load_config("cache.yaml")
model = ModelRecord(weights="w", config={}, chunk_tokens=config.chunk_tokens)
part = Part(layers=(0, LAYERS), heads=(0, 1), content_format="kv float32 4", content_nbytes=NBYTES)
tokens = array("i", range(1000))

def layer(n, first, count):
    numbers = range(n * 10_000 + first, n * 10_000 + first + count)
    return b"".join(number.to_bytes(4, "little") * (NBYTES // 4) for number in numbers)

class KV:
    def gather(self, first, count, payload):
        for n, memory in enumerate(payload):
            memory[:] = layer(n, first, count)

    def scatter(self, first, count, payload):
        for n, memory in enumerate(payload):
            assert bytes(memory) == layer(n, first, count)

with CacheEngine(config, model=model, part=part) as engine:
    if sys.argv[1] == "store":
        print(engine.store(tokens, KV()).num_tokens, engine.flush(30.0))
    else:
        print(engine.retrieve(tokens, KV()).tokens_by_tier)
"""
"""Run with the argument `store` or `load` where `cache.yaml` is; prints `992 True` or `{'tier': 992}`."""
