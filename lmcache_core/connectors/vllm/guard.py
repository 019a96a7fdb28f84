"""How a hook of vLLM's ends when something goes wrong in it: with an answer, and a line in the log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def guarded(answer: Callable[[], Any]) -> Callable[[F], F]:
    """A hook that answers `answer()` in place of raising."""

    def guard(hook: F) -> F:
        @functools.wraps(hook)
        def safe(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:  # recorded boundary: a host engine's hook
                log.exception("%s failed; the engine goes on without", hook.__name__)
                return answer()

        return safe  # type: ignore[return-value]

    return guard


def nothing() -> None:
    return None
