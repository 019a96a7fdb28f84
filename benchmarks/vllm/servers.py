"""The servers that are compared, each started on loopback with the same model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
START_S = 300.0
STOP_S = 60.0
CAPPED_BYTES_PER_S = 128 << 20

MODEL = """
import sys, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
folder, sizes = sys.argv[1], dict(zip(("vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), map(int, sys.argv[2:])))
torch.manual_seed(0)
config = LlamaConfig(**sizes, head_dim=64, max_position_embeddings=1 << 14, tie_word_embeddings=True)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(folder)
"""
SIZES = {"full": (4096, 1024, 2816, 16, 16, 4), "tiny": (4096, 128, 256, 2, 2, 2)}
"""185M parameters, 16 KiB of KV a token in bfloat16; and one to try the benchmark itself with."""


def save_model(folder: Path, size: str) -> Path:
    """A Llama with random weights, made once."""
    if not (folder / "tokenizer.json").exists():
        subprocess.run([sys.executable, "-c", MODEL, folder, *map(str, SIZES[size])], check=True)
    return folder


@contextlib.contextmanager
def vllm(
    model: Path, log: Path, transfer: Mapping[str, object] | None, *options: str, python: str = sys.executable
) -> Iterator[str]:
    """Yields the URL of a vLLM server. `transfer` is its `--kv-transfer-config`."""
    port = free_port()
    command = [
        *(python, str(HERE / "serve.py"), str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--kv-cache-memory-bytes", str(1 << 30), *options),
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with running(command, log, environment) as process:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"vLLM doesn't start; {log} ends:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url


def ours(tiers: Sequence[Mapping[str, object]], **settings: object) -> dict[str, object]:
    """`--kv-transfer-config` for this project's connector."""
    return {
        "kv_connector": "LMCacheCoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": {"tiers": list(tiers)}, **settings},
    }


CPU = {"name": "cpu", "backend": "cpu", "capacity": "1GiB"}


def disk(folder: Path) -> dict[str, object]:
    return {"name": "disk", "backend": "disk", "capacity": "4GiB", "options": {"path": str(folder)}}


def redis(port: int) -> dict[str, object]:
    options = {"url": f"redis://127.0.0.1:{port}"}
    return {"name": "far", "backend": "redis", "options": options, "deadline": "20s"}


@contextlib.contextmanager
def capped_redis(log: Path) -> Iterator[tuple[int, int]]:
    """The ports of a Redis server: its own, and one through which only 128 MiB a second come back."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with running(command, log):
        wait_for(port)
        capped = [sys.executable, str(HERE / "throttle.py"), str(port), str(CAPPED_BYTES_PER_S)]
        with subprocess.Popen(capped, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                yield port, int(process.stdout.readline())
            finally:
                process.stdin.close()


@contextlib.contextmanager
def lmcache(python: str, log: Path) -> Iterator[dict[str, object]]:
    """LMCache's server; yields the `--kv-transfer-config` that uses it. `python` is its environment's."""
    port = free_port()
    command = [
        *(python, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(free_port()), "--l1-size-gb", "2"),
        *("--chunk-size", "256", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "engine_driven"),  # what its connector asks for where there is no GPU
    ]
    with running(command, log, {**os.environ, "LMCACHE_TRACK_USAGE": "false"}):
        wait_for(port)
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended as a user would end it, and killed if that doesn't do."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started itself
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
