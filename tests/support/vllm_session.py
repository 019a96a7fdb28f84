"""Starts vLLM engines in processes of their own, and asks them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_worker import run

START_S = 240.0
ANSWER_S = 240.0

OPTIONS: dict[str, object] = {
    "dtype": "float32",  # only in float32 do tokens not depend on the shape of a batch
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Request:
    tokens: Sequence[int]
    salt: str = ""
    max_tokens: int = 12
    n: int = 1
    """Samples, each of them greedy."""
    adapter: tuple[str, int, str] | None = None
    """Name, number and folder of a LoRA adapter."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    """Of all samples, one after the other."""
    cached: int
    """Prompt tokens that vLLM didn't compute."""
    reason: str


class Engine:
    """One vLLM engine, with the connector when `cache` (the content of a cache.yaml) is given."""

    def __init__(
        self,
        model: Path,
        log: Path,
        cache: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        transfer: Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
        room: tuple[Path, int] | None = None,
        **options: object,
    ) -> None:
        """`room` is a folder where it has a file system of its own, empty and with so many bytes of room."""
        arguments: dict[str, object] = {"model": str(model), **OPTIONS, **options}
        if cache is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "LMCacheCoreConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "config": dict(cache),
                    "prefetch_deadline": "60s",  # however slow the machine is, what is there is a hit
                    **(settings or {}),
                },
                **(transfer or {}),
            }
        self.log = log
        self._questions, theirs = multiprocessing.Pipe()
        self._process = vllm_imported().Process(
            target=run, args=(theirs, arguments, log, dict(environment or {}), room)
        )
        with theirs:
            self._process.start()
        try:
            self._answer(START_S)
        except BaseException:
            self.kill()
            raise

    def generate(self, *requests: Request) -> list[Answer]:
        """Answers to requests that are given at once."""
        return [
            Answer(**answer) for answer in self.ask("generate", [asdict(request) for request in requests])
        ]

    def halfway(self, requests: Sequence[Request], num_steps: int, act: str) -> dict[str, Any]:
        """Gives them at once, and does `act` after so many steps: `vllm_halfway`."""
        answer: dict[str, Any] = self.ask("halfway", [asdict(each) for each in requests], num_steps, act)
        return answer

    def ask(self, verb: str, *arguments: object) -> Any:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: `_answer` says so
            self._questions.send([verb, *arguments])
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """Ends the process as a user would, and waits for it. Idempotent."""
        self._questions.close()
        self._process.join(START_S)
        assert self._process.exitcode == 0, self.log.read_text()[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        else:
            self.close()

    def kill(self) -> None:
        """Idempotent."""
        self._questions.close()
        self._process.kill()
        self._process.join()

    def _answer(self, timeout_s: float) -> Any:
        try:
            if self._questions.poll(timeout_s):
                return self._questions.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(START_S)
        raise AssertionError(
            f"vLLM gave no answer (exit code {self._process.exitcode}); its log ends:\n"
            f"{self.log.read_text()[-6000:]}"
        )


@functools.cache
def vllm_imported() -> ForkServerContext:
    """Makes processes that have imported vLLM already: that takes longer than the rest of a start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.entrypoints.llm"])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def idle(engine: Engine) -> bool:
    """Whether nothing is held for any request, once what was given up has come to its end."""
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        seen = engine.ask("stats")
        if (seen["leases"], seen["pins"], seen["tracked"]) == (0, 0, 0):
            return True
    return False


def idle_in_ranks(engine: Engine, num_ranks: int) -> bool:
    """The same of ranks in processes of their own, where nothing tells how many requests are tracked."""
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        if engine.ask("in_ranks", "held") == [(0, 0)] * num_ranks:
            return True
    return False


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that shares no chunk with another seed's."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, 128) for _ in range(num_tokens)]


def save_llama(folder: Path, *, seed: int = 0, num_layers: int = 3, **changes: object) -> Path:
    """A tiny Llama with random weights, as vLLM reads it; `changes` are added to its config."""
    process = vllm_imported().Process(target=_save_llama, args=(folder, seed, num_layers, changes))
    process.start()
    process.join(START_S)
    assert process.exitcode == 0
    return folder


def _save_llama(folder: Path, seed: int, num_layers: int, changes: Mapping[str, object]) -> None:
    from tiny_models import llama  # torch comes with it, which is nothing for the test's own process

    model = llama(seed=seed, hidden_size=128, num_hidden_layers=num_layers)
    model.config.update(changes)
    model.save_pretrained(folder)


def flip(file: Path) -> None:
    """Flips a byte in every 64 KiB."""
    with file.open("r+b") as data:
        for at in range(9000, file.stat().st_size, 64 << 10):
            data.seek(at)
            byte = data.read(1)
            data.seek(at)
            data.write(bytes([byte[0] ^ 1]))
