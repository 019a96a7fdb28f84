"""What other threads do while the compiled kernels run, and the threads that these start."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from paged_kv import LAYERS, new_payload

from lmcache_core.frame import segment_checksum
from lmcache_core.kernels import OpaqueBlocks, PagedKV
from lmcache_core.kernels.compiled import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs lmcache-core-kernels")

MANY = 500
"""Calls of some milliseconds: at least one of them has the other thread run, if one can."""
SLOTS, HEADS, DIM = 4096, 8, 64


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Python's threads run in turn only where one lets go of the GIL."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def long_call(name: str) -> Callable[[], object]:
    layers = [torch.zeros(1, SLOTS, HEADS, 2 * DIM, dtype=torch.bfloat16) for _ in range(2)]
    payload = [memoryview(bytearray(layer.numel() * 2)) for layer in layers]
    kv, blocks = PagedKV.from_blocks(layers, axes="nshe"), OpaqueBlocks([layer[0] for layer in layers])
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: kv.gather(range(SLOTS), payload),
        "scatter": lambda: kv.scatter(range(SLOTS), payload),
        "gather blocks": lambda: blocks.gather(range(SLOTS), payload),
        "checksum": lambda: segment_checksum(payload[0]),
    }
    return calls[name]


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("name", ["gather", "scatter", "gather blocks", "checksum"])
def test_another_python_thread_runs_during_a_call(name: str) -> None:
    call, wanted, ran = long_call(name), threading.Lock(), threading.Event()

    def other() -> None:
        with wanted:
            ran.set()

    wanted.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    wanted.release()  # it may run now, if it gets the GIL
    calls = 0
    while not ran.is_set() and calls < MANY:
        call()
        calls += 1
    during = ran.is_set()
    thread.join()
    assert during


@pytest.mark.parametrize("threads", [1, 3])
def test_large_calls_start_the_threads_that_they_may_use_and_no_more(threads: int) -> None:
    layers = [torch.zeros(1, SLOTS, HEADS, 2 * DIM, dtype=torch.bfloat16) for _ in range(4)]
    payload = [memoryview(bytearray(layer.numel() * 2)) for layer in layers]
    kv = PagedKV.from_blocks(layers, axes="nshe", threads=threads)
    most, over = 0, threading.Event()

    def threads_here() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, len(threads_here() - before))

    watcher = threading.Thread(target=watch)
    before = threads_here()
    watcher.start()
    calls = 0
    while calls < 20 or (most < threads and calls < MANY):
        kv.gather(range(SLOTS), payload)
        calls += 1
    over.set()
    watcher.join()
    assert most == threads  # the watcher, and all that help the caller


def test_more_threads_move_the_same_bytes() -> None:
    keys = [
        torch.randint(0, 100, [1, 8, 900, 64], dtype=torch.int32).view(torch.float32) for _ in range(LAYERS)
    ]
    values = [tensor + 1 for tensor in keys]
    slots = torch.randperm(900)[:700]
    payloads = []
    for threads in (1, 3):
        payload = new_payload(700, num_heads=8, dim=64)
        PagedKV.from_pairs(keys, values, threads=threads).gather(slots, payload)
        payloads.append([bytes(memory) for memory in payload])
    assert payloads[0] == payloads[1]
