"""The demo's worker process: loads the model, asks the questions, reports. It ends by being killed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache_core.cli import demo_model
from lmcache_core.cli.demo_messages import QUESTIONS, Answer, Document, Failed, Message, Plan, Ready, Stage
from lmcache_core.cli.models import NO_MODEL
from lmcache_core.connectors import needs_extra
from lmcache_core.errors import LMCacheError

if TYPE_CHECKING:
    from lmcache_core.connectors.transformers import CachedGenerator

COLD_S, WARM_S, LOAD_S = 15.0, 3.0, 5.0  # roughly, for the progress bar
FLUSH_S = 60.0


def main() -> None:
    """Reads the plan from the first line of stdin, writes messages to stdout, then waits for its end.

    Ends at once when stdin does: then the parent is gone.
    """
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a library prints is no message

    def say(message: Message) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    try:
        with needs_extra("transformers"):
            work(plan, say)
    except LMCacheError as error:
        say(Failed(reason=str(error)))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock the interpreter wants when it ends by itself
        pass
    os._exit(1)


def work(plan: Plan, say: Callable[[Message], None]) -> None:
    """Does what the plan says; with the last message said, waits for the parent."""
    from lmcache_core.connectors.transformers import CachedGenerator

    say(Stage("Preparing the model", LOAD_S))
    folder = demo_model.find_model(Path(plan.model) if plan.model else None, Path(plan.model_cache))
    say(Stage("Loading the model", LOAD_S))
    model, tokenizer = demo_model.load(folder, NO_MODEL if plan.model else demo_model.DAMAGED_COPY)
    document, prompts = tokenized(tokenizer, document_text())
    say(Stage("Attaching the cache", LOAD_S))
    with CachedGenerator(model, Path(plan.config)) as generator:  # refuses what is too small for this model
        if plan.phase == "first":
            say(Document(num_tokens=len(document)))
            for index, prompt in enumerate(prompts):
                say(Stage(f"Question {index + 1} without the cache", COLD_S))
                say(answer_cold(model, tokenizer, index, prompt, plan.max_new_tokens))
            say(Stage("Reading the document with the cache", COLD_S))
            generator.engine.clear(generator.engine.content(document))  # what an earlier demo left
            generator.prefill(document)
        answer_warm(generator, tokenizer, prompts, plan, say)
        flushed = generator.flush(FLUSH_S)
        down: dict[str, str] = {}
        failed: dict[str, str] = {}
        for tier in generator.engine.stats().tiers:
            if tier.last_error:
                (down if tier.state == "down" else failed)[tier.name] = tier.last_error
        say(Ready(flushed=flushed, down=down, failed=failed))
        threading.Event().wait()  # until the parent kills this process, or is gone itself


def document_text() -> str:
    return files("lmcache_core.cli").joinpath("demo_document.md").read_text(encoding="utf-8")


def tokenized(tokenizer: Any, document: str) -> tuple[list[int], list[list[int]]]:
    """Tokens of what all prompts share, and of each whole prompt, which begins with exactly those."""
    shared: list[int] = []
    prompts: list[list[int]] = []
    for question in QUESTIONS:
        asked = f"\n\n{question}"
        text = document + asked
        if tokenizer.chat_template:
            text = str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            )
        split = text.rindex(asked)
        shared = tokenizer(text[:split], add_special_tokens=False)["input_ids"]
        prompts.append([*shared, *tokenizer(text[split:], add_special_tokens=False)["input_ids"]])
    return shared, prompts


def answer_cold(
    model: Any,
    tokenizer: Any,
    index: int,
    prompt: Sequence[int],
    max_new_tokens: int,
) -> Answer:
    """The reference: Transformers' own greedy `generate`, which knows nothing of this project."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    arrivals: list[float] = []

    class Clock(BaseStreamer):
        """Notes when the prompt (at the start) and each token were put."""

        def put(self, value: object) -> None:
            arrivals.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = torch.tensor([prompt])
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=Clock(),
    )
    tokens = output[0, len(prompt) :].tolist()
    return Answer(
        question=index,
        run="cold",
        tokens=tokens,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        first_token_s=[arrivals[1] - started],
        num_loaded_tokens=0,
        num_computed_tokens=len(prompt),
    )


def answer_warm(
    generator: CachedGenerator,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    say: Callable[[Message], None],
) -> None:
    """Answers each question from the cache, storing nothing, so that each repetition finds the same.

    After a restart, what was promoted to a nearer tier is removed before each repetition: all of them
    load from where the first one did.
    """
    nearer: list[str] = []
    for index, prompt in enumerate(prompts):
        say(Stage(f"Question {index + 1} from the cache", WARM_S))
        seconds: list[float] = []
        for repetition in range(plan.repeats):
            if nearer:
                generator.flush(FLUSH_S)
                generator.engine.clear(generator.engine.content(prompt), search_range=nearer)
            whole = repetition == 0
            result = generator.generate(
                prompt, max_new_tokens=plan.max_new_tokens if whole else 1, store=False
            )[0]
            seconds.append(result.first_token_s)
            if whole:
                answer = result
            if plan.phase == "restart" and index == repetition == 0:
                names = [tier.name for tier in generator.engine.stats().tiers]
                served = [name for name in names if name in result.prompt.tokens_by_tier]
                nearer = names[: names.index(served[0])] if served else []
        say(
            Answer(
                question=index,
                run="warm" if plan.phase == "first" else "restart",
                tokens=list(answer.tokens),
                text=tokenizer.decode(list(answer.tokens), skip_special_tokens=True),
                first_token_s=seconds,
                num_loaded_tokens=answer.prompt.num_loaded_tokens,
                num_computed_tokens=answer.prompt.num_computed_tokens,
                tokens_by_tier=dict(answer.prompt.tokens_by_tier),
            )
        )


if __name__ == "__main__":
    main()
