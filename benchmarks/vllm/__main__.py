"""vLLM's server with and without a cache, under the same requests. Run it in vLLM's environment.

    python benchmarks/vllm [--only none,engine,…] [--size full|tiny] [--lmcache PYTHON] [--folder DIR]
    python benchmarks/vllm --url http://HOST:PORT --model NAME [--kind document-qa|multi-round|random]
        [--rates 0.5,1] [--requests 20] [--documents 4] [--document 8192]

The first starts each server on loopback with a random Llama (185M parameters, bfloat16), fills its cache
with the documents, and asks; what is measured is kept in DIR, so that sides can be run one by one. The
second asks a server that already runs, on any hardware. Sides:

- `none`: no cache; `engine`: vLLM's own prefix cache;
- `cpu`: this connector, from memory; `disk`: from a disk directory, after a restart of the server;
- `far` and `far-off`: after a restart, from a Redis tier of which 128 MiB a second come back, with the
  prefetch, and with so little time for it that nothing arrives;
- `lmcache`: LMCache's server mode, from its memory; PYTHON is of an environment with vLLM and LMCache.

TTFT is from when a request was due. `alone` asks one at a time, each about another document; the other rates
are Poisson arrivals. Sides with a restart are started anew for each row: what is asked for again comes from
memory there. Exits with 1 when an answer is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import servers
from client import Answer, Figures, ask_all, ask_in_turn, figures
from workload import KINDS, Prompt, Shape, arrivals, document_qa

SIDES = ("none", "engine", "cpu", "disk", "far", "far-off", "lmcache")
RATES = {"full": {0.1: 4, 0.5: 6, 1.0: 8}, "tiny": {1.0: 3, 4.0: 6}}
"""Requests a second, and how many of them; half as many where each is computed."""
COMPUTING = ("none", "far-off")
AIMS = (("cpu", "engine", 1.3), ("disk", "engine", 3.5), ("cpu", "lmcache", 0.25))
"""TTFT of the first, alone, is at most so many times that of the second."""

Rows = dict[str, dict[str, dict[str, float]]]
Server = Callable[[], contextlib.AbstractContextManager[str]]
"""Gives the URL of a server for one row."""


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is ended
    if arguments.url:
        shape = Shape(document=arguments.document, documents=arguments.documents)
        rates = dict.fromkeys(arguments.rates, arguments.requests)
        row = measure(
            lambda: contextlib.nullcontext(arguments.url),
            *(arguments.model, shape, arguments.kind, shape.documents, rates),
        )
        print(table({arguments.url: as_dict(row)}))
        return any(each.errors for each in row.values())
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="lmcache-core-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = servers.save_model(folder / f"model-{arguments.size}", arguments.size)
    shape = Shape() if arguments.size == "full" else Shape(document=512)
    kept = folder / f"vllm-{arguments.size}.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for side in arguments.only or SIDES:
        if side == "lmcache" and not arguments.lmcache:
            print("lmcache is left out: --lmcache names no environment", flush=True)
            continue
        share = 2 if side in COMPUTING else 1
        alone = shape.documents // share
        rates = {rate: num_requests // share for rate, num_requests in RATES[arguments.size].items()}
        with started(side, model, folder, shape, arguments.lmcache) as server:
            measured = measure(server, str(model), shape, "document-qa", alone, rates)
        rows[side] = as_dict(measured)
        kept.write_text(json.dumps(rows))
        print(table({side: rows[side]}), flush=True)
    report = f"{machine(arguments.size)}\n\n{table(rows)}\n\n{aims(rows)}\n"
    print(report)
    (folder / f"vllm-{arguments.size}.md").write_text(report)
    return any(row["errors"] for side in rows.values() for row in side.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/vllm")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--size", choices=sorted(servers.SIZES), default="full")
    parser.add_argument("--folder", help="keeps the model, the logs and what was measured")
    parser.add_argument("--lmcache", metavar="PYTHON")
    parser.add_argument("--url")
    parser.add_argument("--model", help="the name under which the server at --url knows its model")
    parser.add_argument("--kind", choices=sorted(KINDS), default="document-qa")
    parser.add_argument("--document", type=positive, default=8192, help="tokens")
    parser.add_argument("--documents", type=positive, default=4)
    parser.add_argument("--requests", type=positive, default=20, help="for each rate")
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[1.0])
    arguments = parser.parse_args()
    for side in arguments.only or ():
        if side not in SIDES:
            parser.error(f"--only: {side!r} is none of {', '.join(SIDES)}")
    if arguments.url and not arguments.model:
        parser.error("--url needs --model")
    return arguments


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def measure(
    server: Server, model: str, shape: Shape, kind: str, alone: int, rates: dict[float, int]
) -> dict[str, Figures]:
    """One row alone and one a rate; every request of all of them asks something else."""
    with server() as url:
        answers = ask_in_turn(url, model, KINDS[kind](shape, alone, seed=0))
    due = [sum(answer.end_s for answer in answers[:number]) for number in range(len(answers))]
    rows = {"alone": figures(answers, due)}
    for seed, (rate, num_requests) in enumerate(rates.items(), start=1):
        due = arrivals(rate, num_requests, seed)
        with server() as url:
            answers = ask_all(url, model, KINDS[kind](shape, num_requests, seed), due)
        rows[f"{rate:g}/s"] = figures(answers, due)
    return rows


@contextlib.contextmanager
def started(
    side: str, model: Path, folder: Path, shape: Shape, lmcache_python: str | None
) -> Iterator[Server]:
    """What gives a side's server for a row, its cache filled."""
    log = folder / f"{side}.log"
    log.unlink(missing_ok=True)
    off = "--no-enable-prefix-caching"  # what vLLM holds itself would hide what is measured

    @contextlib.contextmanager
    def vllm(
        transfer: dict[str, object] | None, *options: str, python: str = sys.executable
    ) -> Iterator[str]:
        with servers.vllm(model, log, transfer, *options, python=python) as url:
            check(ask_in_turn(url, str(model), [Prompt(list(range(3, 131)), 2)]))  # the first one is slow
            yield url

    def fill(url: str) -> Server:
        check(ask_in_turn(url, str(model), document_qa(shape, shape.documents, seed=-1)))
        return lambda: contextlib.nullcontext(url)

    if side == "none":
        with vllm(None, off) as url:
            yield lambda: contextlib.nullcontext(url)
    elif side == "engine":
        with vllm(None, "--enable-prefix-caching") as url:
            yield fill(url)
    elif side == "cpu":
        with vllm(servers.ours([servers.CPU]), off) as url:
            yield fill(url)
    elif side == "disk":
        with tempfile.TemporaryDirectory(dir=folder) as path:
            transfer = servers.ours([servers.CPU, servers.disk(Path(path))])
            with vllm(transfer, off) as url:
                fill(url)
            yield lambda: vllm(transfer, off)
    elif side in ("far", "far-off"):
        with servers.capped_redis(log) as (port, capped):
            with vllm(servers.ours([servers.CPU, servers.redis(port)]), off) as url:
                fill(url)
            deadline = "30s" if side == "far" else "1ms"
            tiers = [servers.CPU, servers.redis(capped)]
            yield lambda: vllm(servers.ours(tiers, prefetch_deadline=deadline), off)
    else:
        assert lmcache_python is not None
        with (
            servers.lmcache(lmcache_python, log) as transfer,
            vllm(transfer, off, python=lmcache_python) as url,
        ):
            yield fill(url)


def check(answers: Sequence[Answer]) -> None:
    """
    Raises:
        RuntimeError: an answer is missing; says what came instead.
    """
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise RuntimeError(f"filling the cache failed: {errors[0]}")


def as_dict(row: dict[str, Figures]) -> dict[str, dict[str, float]]:
    return {rate: asdict(each) for rate, each in row.items()}


def table(rows: Rows) -> str:
    heads = ("side", "rate", "TTFT, s", "TTFT p99", "ITL p50 / p99, ms", "requests/s", "cached", "errors")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for side, row in rows.items():
        for rate, each in row.items():
            cells = (
                *(side, rate, f"{each['ttft_s']:.3f}", f"{each['ttft_p99_s']:.3f}"),
                f"{each['itl_p50_s'] * 1e3:.0f} / {each['itl_p99_s'] * 1e3:.0f}",
                *(f"{each['requests_per_s']:.2f}", f"{each['cached_tokens']:.0f}"),
                f"{each['errors']} of {each['num_requests']}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def aims(rows: Rows) -> str:
    """TTFT, alone, of one side over another's."""
    lines = []
    for one, other, aim in AIMS:
        if one in rows and other in rows:
            ratio = rows[one]["alone"]["ttft_s"] / rows[other]["alone"]["ttft_s"]
            verdict = "met" if ratio <= aim else "missed"
            lines.append(f"- TTFT from {one}: {ratio:.2f} of {other} (aim: at most {aim}; {verdict})")
    return "\n".join(lines)


def machine(size: str) -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = found[1] if found else platform.machine()
    return f"{processor}, {os.cpu_count()} cores; `python benchmarks/vllm --size {size} --lmcache …`"


if __name__ == "__main__":
    sys.exit(main())
