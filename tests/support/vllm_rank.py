"""What a test does in the process of one rank: to its cache, and to a backend `faulty` that obeys it.

Where ranks are processes of their own, `Connector` brings this module into them, by
`"kv_connector": "Connector", "kv_connector_module_path": "vllm_rank"`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from faulty_backends import Controls, faulty
from vllm.distributed import get_tensor_model_parallel_rank

import lmcache_core.engine.engine as engine_module
from lmcache_core.connectors.vllm import rank
from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector as Connector

__all__ = ["VERBS", "Connector", "held", "in_rank", "rank_cache"]

controls = Controls()
engine_module.discover = lambda: faulty(controls)  # a backend `faulty` beside those installed
failed: list[str] = []
lost: list[int] = []


def rank_cache() -> Any:
    [cache] = rank._caches.values()
    return cache


def held() -> tuple[int, int]:
    """The leases and pins of this rank's cache, once what waits is written."""
    engine = rank_cache().engines[0]
    engine.flush()
    return engine.stats().memory.leases, len(engine._chain.pins.active())


def clear(tier: str) -> object:
    return [engine.clear(search_range=[tier]) for engine in rank_cache().engines]


def fail_gets(one_in: int) -> None:
    """From now on one get in so many fails, at random, and others in each rank; none, with 0."""
    drawn = random.Random(one_in + get_tensor_model_parallel_rank())

    def fails(op: str, key: str) -> bool:
        if op != "get" or not one_in or drawn.randrange(one_in):
            return False
        failed.append(key)
        return True

    controls.fail = fails


def failed_gets() -> int:
    return len(failed)


def hang(op: str, on: bool) -> None:
    if on:
        controls.hang(op)
    else:
        controls.let_go(op)


def lose_promises(on: bool) -> None:
    """While on, of what was promised to vLLM only the first chunk is there when it is loaded."""
    engine = rank_cache().engines[-1]
    if not on:
        del engine.retrieve
        return

    def first_chunk(content: Any, target: Any, **options: Any) -> Any:
        lost.append(content.num_tokens - engine.model.chunk_tokens)
        return type(engine).retrieve(engine, content, target, limit=engine.model.chunk_tokens, **options)

    engine.retrieve = first_chunk


def lost_promises() -> int:
    return sum(lost)


VERBS: dict[str, Callable[..., object]] = {
    each.__name__: each for each in (held, clear, fail_gets, failed_gets, hang, lose_promises, lost_promises)
}


def in_rank(worker: object, verb: str, arguments: tuple[object, ...], only: int | None) -> object:
    """For vLLM's `collective_rpc`: does `verb` in every rank, or in the one."""
    mine = only in (None, get_tensor_model_parallel_rank())
    return VERBS[verb](*arguments) if mine else None
