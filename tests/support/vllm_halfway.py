"""What a test does to a running vLLM engine between two steps, or between a lookup and its load."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache_core.engine import CacheEngine
from lmcache_core.tiers import writes
from lmcache_core_disk.files import Files

CALLS: Mapping[str, Callable[..., Any]] = {"prefetch": CacheEngine.prefetch, "retrieve": CacheEngine.retrieve}


def run_halfway(engine: Any, requests: Sequence[Mapping[str, Any]], num_steps: int, act: str) -> object:
    """Gives all requests at once, takes so many steps, does `act` (`abort`, `reset`), and runs to the end.

    A reset waits until none waits for slower tiers: such a request is computed after it, and rightly kept.
    Tells how many were running then, and the tokens of those that were finished afterwards.
    """
    finished: list[list[int]] = []

    def step() -> None:
        finished.extend([*output.outputs[0].token_ids] for output in engine.step() if output.finished)

    running = {engine.add_request(f"halfway-{number}", **request) for number, request in enumerate(requests)}
    for _ in range(num_steps):
        step()
    unfinished = engine.engine_core.engine_core.scheduler.requests
    while act == "reset" and not all(request.num_computed_tokens for request in unfinished.values()):
        step()
    num_running = len(running) - len(finished)
    finished.clear()
    if act == "abort":
        engine.abort_request(sorted(running), internal=True)
    else:
        engine.reset_prefix_cache(reset_connector=True)
    while engine.has_unfinished_requests():
        step()
    return {"running": num_running, "finished": finished}


def lose_files(folder: str, at: str) -> int:
    """From now on a disk tier's files are gone before each `prefetch` (what a lookup starts) or `retrieve`.

    With an `at` that is neither, nothing is lost any more. Returns how many directories were lost so far.
    """
    for name, call in CALLS.items():
        setattr(CacheEngine, name, _after_loss(folder, call) if name == at else call)
    return len(_lost)


_lost: list[Path] = []


def _after_loss(folder: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def without_files(*arguments: Any, **options: Any) -> Any:
        for directory in Path(folder).glob("shard-*/slots/*"):
            shutil.rmtree(directory)
            _lost.append(directory)
        return call(*arguments, **options)

    return without_files


def die_writing(num_writes: int) -> None:
    """The process is killed within the write after so many of a disk tier, when half of it is written."""
    written = itertools.count()
    write = Files.pwritev

    def dies(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(written) == num_writes:
            write(files, fd, buffers[: len(buffers) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(files, fd, buffers, offset)

    Files.pwritev = dies


def fill(folder: str, num_left: int | None) -> None:
    """Takes its file system's room but for so many bytes; gives it back, with None."""
    file = Path(folder, "others")
    if num_left is None:
        file.unlink()
    else:
        with file.open("wb") as others:
            os.posix_fallocate(others.fileno(), 0, free_bytes(folder) - num_left)


def believe_full_for(seconds: float) -> None:
    """How long a tier takes its store for full, once it was: a minute is long for a test."""
    writes.RECOVER_CAPACITY_S = seconds


def free_bytes(folder: str) -> int:
    """What its file system has left."""
    return shutil.disk_usage(folder).free
