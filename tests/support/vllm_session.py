"""Starts vLLM engines in processes of their own, and asks them."""

from __future__ import annotations

import json
import os
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_worker import ANSWER

WORKER = Path(__file__).with_name("vllm_worker.py")
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
        within: Sequence[str] = (),
        **options: object,
    ) -> None:
        """`within` is the start of a command that runs what follows it."""
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
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [*within, sys.executable, str(WORKER), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                text=True,
            )
        try:
            self._answer(START_S)
        except BaseException:
            self._process.kill()
            self._process.communicate()
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
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """Ends the process as a user would, and waits for it. Idempotent."""
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._process.communicate(timeout=START_S)
        assert self._process.returncode == 0, self.log.read_text()[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
            self._process.communicate()
        else:
            self.close()

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                line = self._process.stdout.readline()
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
                if not line:
                    break
        raise AssertionError(f"vLLM gave no answer; its log ends:\n{self.log.read_text()[-6000:]}")


def idle(engine: Engine) -> bool:
    """Whether nothing is held for any request, once what was given up has come to its end."""
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        seen = engine.ask("stats")
        if (seen["leases"], seen["pins"], seen["tracked"]) == (0, 0, 0):
            return True
    return False


def file_system(folder: Path, nbytes: int) -> list[str]:
    """A command that runs another one, which alone sees a file system with so much room at `folder`."""
    mounted = 'mount -t tmpfs -o size="$1" tmpfs "$0" && shift && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, str(folder), str(nbytes)]


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that shares no chunk with another seed's."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, 128) for _ in range(num_tokens)]


def save_llama(folder: Path, *, seed: int = 0, num_layers: int = 3, **changes: object) -> Path:
    """A tiny Llama with random weights, as vLLM reads it; `changes` are added to its config."""
    code = (
        "import sys, json; from tiny_models import llama; "
        "changes = json.loads(sys.argv[3]); "
        "model = llama(seed=int(sys.argv[1]), hidden_size=128, num_hidden_layers=int(sys.argv[2])); "
        "model.config.update(changes); model.save_pretrained(sys.argv[4])"
    )
    environment = {**os.environ, "PYTHONPATH": str(WORKER.parent)}
    arguments = [str(seed), str(num_layers), json.dumps(changes), str(folder)]
    subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=True, timeout=START_S)
    return folder


def flip(file: Path) -> None:
    """Flips a byte in every 64 KiB."""
    with file.open("r+b") as data:
        for at in range(9000, file.stat().st_size, 64 << 10):
            data.seek(at)
            byte = data.read(1)
            data.seek(at)
            data.write(bytes([byte[0] ^ 1]))
