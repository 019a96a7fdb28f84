"""Asks an OpenAI-compatible server, and measures what comes back."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from workload import Prompt

TIMEOUT_S = 900.0


@dataclass(slots=True)
class Answer:
    """One request's. Seconds on the client's clock, from when the request was due."""

    ttft_s: float = 0.0
    end_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    """Between one token and the next."""
    cached_tokens: int = 0
    error: str = ""


def ask_all(url: str, model: str, prompts: Sequence[Prompt], due_s: Sequence[float]) -> list[Answer]:
    """Sends each prompt when it is due, whatever became of those before."""
    return asyncio.run(_ask_all(url, model, prompts, due_s))


def ask_in_turn(url: str, model: str, prompts: Sequence[Prompt]) -> list[Answer]:
    """Sends each prompt when the one before is answered."""
    return [ask_all(url, model, [prompt], [0.0])[0] for prompt in prompts]


async def _ask_all(url: str, model: str, prompts: Sequence[Prompt], due_s: Sequence[float]) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.monotonic()
        asked = [
            _ask(session, url, model, prompt, start + due) for prompt, due in zip(prompts, due_s, strict=True)
        ]
        return await asyncio.gather(*asked)


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: Prompt, due: float) -> Answer:
    body = {
        "model": model,
        "prompt": list(prompt.tokens),
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    await asyncio.sleep(due - time.monotonic())
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
                return answer
            last = None
            async for line in response.content:
                name, _, data = line.decode().partition(":")
                if name != "data" or data.strip() == "[DONE]":
                    continue  # a comment that keeps the connection alive, a field of the event, its end
                now, event = time.monotonic(), json.loads(data)
                if "error" in event:
                    answer.error = str(event["error"])
                    return answer
                if event.get("choices"):
                    if last is None:
                        answer.ttft_s = now - due
                    else:
                        answer.itl_s.append(now - last)
                    last = now
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                answer.cached_tokens = details.get("cached_tokens") or answer.cached_tokens
            answer.end_s = time.monotonic() - due
            answer.error = "" if last else "no token"
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = str(error) or type(error).__name__
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run. Medians and percentiles over the requests that were answered."""

    num_requests: int
    errors: int
    ttft_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    requests_per_s: float
    cached_tokens: float


def figures(answers: Sequence[Answer], due_s: Sequence[float]) -> Figures:
    """
    Raises:
        RuntimeError: nothing was answered; says what came instead.
    """
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise RuntimeError(f"no request was answered: {answers[0].error}")
    ends = [due + answer.end_s for answer, due in zip(answers, due_s, strict=True) if not answer.error]
    gaps = [gap for answer in good for gap in answer.itl_s] or [0.0]
    return Figures(
        num_requests=len(answers),
        errors=len(answers) - len(good),
        ttft_s=statistics.median(answer.ttft_s for answer in good),
        ttft_p99_s=percentile([answer.ttft_s for answer in good], 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        requests_per_s=len(good) / max(ends),
        cached_tokens=statistics.mean(answer.cached_tokens for answer in good),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all are not above."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]
