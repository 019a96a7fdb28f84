"""What the scheduler pays to ask again for a request whose KV is still on its way from a slower tier.

    python benchmarks/vllm/deferred.py [--document 8192] [--calls 1000]

One engine with a small random Llama, a memory tier that holds one document, and a Redis server of which
128 MiB a second come back. The first document is asked for again when the others have pushed it out of
memory: while it arrives, the engine's own question for it is put `calls` times. Exits with 1 when one of
them was not told to wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import servers
from workload import Shape, random_prompts


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/vllm/deferred.py")
    parser.add_argument("--document", type=int, default=8192)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-core-bench-") as folder,
        servers.capped_redis(Path(folder) / "redis.log") as (_, port),
    ):
        answers, seconds = ask_again(Path(folder), port, arguments.document, arguments.calls)
    waits = answers.count((None, False))
    twentieths = [1e6 * each for each in statistics.quantiles(seconds, n=20)]
    print(
        f"{waits} of {len(answers)} questions for {arguments.document} tokens were told to wait; "
        f"one takes {twentieths[9]:.2f} us (median), {twentieths[-1]:.2f} us (95 of 100)"
    )
    return waits < len(answers)


def ask_again(folder: Path, port: int, document: int, calls: int) -> tuple[list[object], list[float]]:
    """What each of the questions was answered, and how long each took."""
    from vllm import LLM, SamplingParams

    from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector

    nbytes = document << 10  # of KV: a KiB a token
    tiers = [{**servers.CPU, "capacity": nbytes * 3 // 2}, servers.redis(port)]
    llm = LLM(
        str(servers.save_model(folder / "model", "tiny")),
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_transfer_config=servers.ours(tiers, prefetch_deadline="30s"),
    )
    hook = LMCacheCoreConnector.get_num_new_matched_tokens
    answers: list[object] = []
    seconds: list[float] = []

    def asked(connector: LMCacheCoreConnector, request: Any, num_computed_tokens: int) -> Any:
        answer = hook(connector, request, num_computed_tokens)
        if answer[0] is None and not answers:
            for _ in range(calls):
                start = time.perf_counter()
                answer = hook(connector, request, num_computed_tokens)
                seconds.append(time.perf_counter() - start)
                answers.append(answer)
        return answer

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": prompt.tokens} for prompt in random_prompts(Shape(document=document), 3, seed=0)
    ]
    for prompt in prompts:
        llm.generate([prompt], sampling, use_tqdm=False)
    LMCacheCoreConnector.get_num_new_matched_tokens = asked  # type: ignore[method-assign,assignment]
    llm.generate([prompts[0]], sampling, use_tqdm=False)
    if not answers:
        raise RuntimeError("the first document was still in memory: nothing had to be waited for")
    return answers, seconds


if __name__ == "__main__":
    sys.exit(main())
