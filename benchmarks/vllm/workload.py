"""What is asked, and when: three kinds of requests, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_TOKEN = 3
"""Token ids below are kept for a tokenizer's own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is asked. Lengths are in tokens."""

    document: int = 8192
    question: int = 48
    answer: int = 16
    documents: int = 4
    vocabulary: int = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Sequence[int]
    max_tokens: int


def document_qa(shape: Shape, num_requests: int, seed: int) -> list[Prompt]:
    """Questions about a few documents: each prompt is a document and a question of its own."""
    documents = [_text(shape, shape.document, f"document {number}") for number in range(shape.documents)]
    return [
        Prompt(
            [
                *documents[number % shape.documents],
                *_text(shape, shape.question, f"{seed} question {number}"),
            ],
            shape.answer,
        )
        for number in range(num_requests)
    ]


def multi_round(shape: Shape, num_requests: int, seed: int) -> list[Prompt]:
    """Chats that begin with a document: each round's prompt holds every round before.

    The answers in a prompt are drawn like the questions, so that a server's own don't change the work.
    """
    chats = [_text(shape, shape.document, f"document {number}") for number in range(shape.documents)]
    prompts = []
    for number in range(num_requests):
        chat = number % shape.documents
        chats[chat] = [*chats[chat], *_text(shape, shape.question, f"{seed} round {number}")]
        prompts.append(Prompt(chats[chat], shape.answer))
        chats[chat] = [*chats[chat], *_text(shape, shape.answer, f"{seed} answer {number}")]
    return prompts


def random_prompts(shape: Shape, num_requests: int, seed: int) -> list[Prompt]:
    """Prompts that share nothing: what a cache costs where it can't help."""
    return [
        Prompt(_text(shape, shape.document, f"{seed} alone {number}"), shape.answer)
        for number in range(num_requests)
    ]


KINDS = {"document-qa": document_qa, "multi-round": multi_round, "random": random_prompts}


def arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """When each request comes, in seconds from the first: a Poisson process of `rate` requests a second."""
    drawn = random.Random(f"{seed} arrivals")
    times = [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + drawn.expovariate(rate))
    return times[:num_requests]


def _text(shape: Shape, num_tokens: int, name: str) -> list[int]:
    drawn = random.Random(name)
    return [drawn.randrange(FIRST_TOKEN, shape.vocabulary) for _ in range(num_tokens)]
