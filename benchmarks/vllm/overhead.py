"""What the connector costs while a prompt that no cache holds is computed: a share of the prefill.

    python benchmarks/vllm/overhead.py MODEL [--document 8192] [--prompts 3] [--disk DIR]

One engine in this process, scheduler and worker on its main thread. Counted: the time inside our hooks on
that thread, and CPU time of our own threads, until all that was stored is written. Exits with 1 above 3%.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from workload import Shape, random_prompts

BOUND = 0.03
HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "wait_for_save", "get_block_ids_with_load_errors", "build_connector_worker_meta"),
    "get_kv_connector_stats",
)


def timed(connector: type, names: tuple[str, ...], seconds: Counter[str]) -> None:
    """Makes each hook add the time it takes to `seconds`. No hook calls another."""
    for name in names:
        hook = getattr(connector, name)

        @functools.wraps(hook)
        def counted(*args: Any, _hook: Any = hook, _name: str = name, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return _hook(*args, **kwargs)
            finally:
                seconds[_name] += time.perf_counter() - start

        setattr(connector, name, counted)


def threads_cpu_s(prefix: str = "lmcache") -> float:
    """CPU seconds of this process's living threads of that name, of the kernel's own count."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            with Path(f"/proc/self/task/{thread.native_id}/schedstat").open() as counts:
                total += int(counts.read().split()[0]) / 1e9
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/vllm/overhead.py")
    parser.add_argument("model")
    parser.add_argument("--document", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--disk")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    from lmcache_core.connectors.vllm import rank
    from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector

    tiers: list[dict[str, object]] = [{"name": "cpu", "backend": "cpu", "capacity": "1GiB"}]
    if arguments.disk:
        options = {"path": arguments.disk}
        tiers.append({"name": "disk", "backend": "disk", "capacity": "4GiB", "options": options})
    seconds: Counter[str] = Counter()
    timed(LMCacheCoreConnector, HOOKS, seconds)
    llm = LLM(
        arguments.model,
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_transfer_config={
            "kv_connector": "LMCacheCoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": {"tiers": tiers}},
        },
    )
    [cache] = rank._caches.values()
    [engine] = cache.engines
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    shares = []
    # The first prompt warms up what is made on first use, and isn't counted.
    for prompt in random_prompts(Shape(document=arguments.document), 1 + arguments.prompts, seed=0):
        seconds.clear()
        cpu, start = threads_cpu_s(), time.perf_counter()
        [output] = llm.generate([{"prompt_token_ids": list(prompt.tokens)}], sampling, use_tqdm=False)
        prefill = time.perf_counter() - start
        engine.flush()
        cpu = threads_cpu_s() - cpu
        if output.num_cached_tokens:
            raise RuntimeError(f"{output.num_cached_tokens} tokens were cached: this is no cold prefill")
        hooks = sum(seconds.values())
        shares.append((hooks + cpu) / prefill)
        most = ", ".join(f"{name} {each * 1e3:.1f}" for name, each in seconds.most_common(3))
        print(
            f"prefill {prefill:.2f} s, hooks {hooks * 1e3:.1f} ms ({most}), threads {cpu * 1e3:.1f} ms of CPU"
        )
    share = statistics.median(shares[1:])
    verdict = "met" if share <= BOUND else "missed"
    print(f"{share:.2%} of a cold prefill of {arguments.document} tokens, bound {BOUND:.0%}: {verdict}")
    return verdict == "missed"


if __name__ == "__main__":
    sys.exit(main())
