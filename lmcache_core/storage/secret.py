"""Secrets in a backend's options: text that no repr, log line or error message shows."""

from __future__ import annotations

import hmac
from typing import Self, final


@final
class Secret:
    """A password or token; only `reveal` gives it away.

    >>> password = Secret("hunter2")
    >>> print(password, [password])
    *** [Secret(***)]
    >>> password.reveal()
    'hunter2'
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    @classmethod
    def from_config(cls, value: object) -> Self:
        """`value` as found in a config file.

        Raises:
            ValueError: it isn't text. The message doesn't show it.
        """
        if not isinstance(value, str):
            raise ValueError("expected a secret as text; put it in quotes (its value is not shown)")
        return cls(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"
