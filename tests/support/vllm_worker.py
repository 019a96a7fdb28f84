"""What runs in the process of one vLLM engine: does what a test asks, one thing after the other."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NEW_MOUNTS, NEW_USER = 0x0002_0000, 0x1000_0000
PRIVATE_MOUNTS = 0x4000 | 0x4_0000


def run(
    questions: Connection,
    options: Mapping[str, Any],
    log: Path,
    environment: Mapping[str, str],
    room: tuple[Path, int] | None,
) -> None:
    """Serves until the other side closes. `options` are LLM's; `room` is a file system to mount: `Engine`."""
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.enable()
    os.environ.update(environment)
    if room is not None:
        mount(*room)
    serve(questions, options)
    gc.collect()
    atexit._run_exitfuncs()  # as when a user's process ends; one of multiprocessing's leaves them out


def mount(folder: Path, nbytes: int) -> None:
    """An empty file system with so much room, which only this process sees. Needs no privileges."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(NEW_MOUNTS | NEW_USER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE_MOUNTS), None))
    check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), b"size=%d" % nbytes))


def serve(questions: Connection, options: Mapping[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_halfway import (
        believe_full_for,
        die_writing,
        fill,
        free_bytes,
        lose_files,
        run_halfway,
    )
    from vllm_rank import VERBS, held, in_rank, rank_cache

    import lmcache_core.connectors.vllm.memory as memory_module

    if os.environ.get("BLOCKS_AS_ON_A_GPU"):
        memory_module.OpaqueBlocks = partial(memory_module.DeviceBlocks, block_tokens=16)
    llm = LLM(**options)

    def arguments_of(request: dict[str, Any]) -> dict[str, Any]:
        prompt = {"prompt_token_ids": request["tokens"]}
        if request["salt"]:
            prompt["cache_salt"] = request["salt"]
        params = SamplingParams(
            n=request["n"],
            temperature=0 if request["n"] == 1 else 1,
            top_k=1,  # as good as greedy, and takes several samples
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        adapter = request["adapter"]
        return {
            "prompt": prompt,
            "params": params,
            "lora_request": LoRARequest(*adapter) if adapter else None,
        }

    def generate(requests: list[dict[str, Any]]) -> object:
        asked = [arguments_of(request) for request in requests]
        prompts, params, adapters = ([each[name] for each in asked] for name in asked[0])
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        return [
            {
                "tokens": [token for sample in output.outputs for token in sample.token_ids],
                "cached": output.num_cached_tokens,
                "reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def halfway(requests: list[dict[str, Any]], num_steps: int, act: str) -> object:
        asked = [arguments_of(request) for request in requests]
        return run_halfway(llm.llm_engine, asked, num_steps, act)

    def stats() -> object:
        leases, pins = held()
        engine = rank_cache().engines[0]
        seen = engine.stats()
        return {
            "tiers": {
                tier.name: {"state": tier.state, "entries": tier.entries, **tier.counters}
                for tier in seen.tiers
            },
            "leases": leases,
            "pins": pins,
            "tracked": len(llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler._tracked),
            "resident_bytes": resident_bytes(),
            "groups": [group.window for group in rank_cache().groups],
        }

    def metrics() -> object:
        """vLLM's own metrics, as its server would show them."""
        named = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        return {
            name: value for name, value in named.items() if re.search("lmcache|external|spec_decode", name)
        }

    def reset() -> object:
        return llm.reset_prefix_cache(reset_connector=True)

    def reset_vllm() -> object:
        """Forgets what vLLM itself holds of finished requests."""
        return llm.reset_prefix_cache()

    preempted = []
    preempt = Scheduler._preempt_request

    def counted(scheduler: Any, request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(scheduler, request, *arguments, **options)

    Scheduler._preempt_request = counted

    def preemptions() -> int:
        return len(preempted)

    def in_ranks(verb: str, *arguments: object) -> object:
        """What each rank answers, where they are processes of their own."""
        return llm.collective_rpc(in_rank, args=(verb, arguments, None))

    def in_one_rank(only: int, verb: str, *arguments: object) -> object:
        return llm.collective_rpc(in_rank, args=(verb, arguments, only))[only]

    verbs: dict[str, Callable[..., object]] = VERBS | {
        each.__name__: each
        for each in (
            *(generate, halfway, stats, metrics, reset, reset_vllm, preemptions, in_ranks, in_one_rank),
            *(lose_files, free_bytes, die_writing, fill, believe_full_for),
        )
    }
    questions.send("ready")
    while True:
        try:
            verb, *arguments = questions.recv()
        except EOFError:
            return
        questions.send(verbs[verb](*arguments))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
