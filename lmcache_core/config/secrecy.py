"""What no message shows: values of options that are named like secrets, and credentials inside texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_SECRET_NAME = re.compile(
    r"passw|passphrase|pwd|secret|credential|signature|(api|access|private|account|shared|auth)[-_]?key"
    r"|(^|[-_.])(pass|token|key|pin|auth|sig|sas|dsn|cookie|bearer)$",
    re.IGNORECASE,
)
_WITH_CREDENTIALS = re.compile(
    r"\w://[^/\s]*@|(passw\w*|pwd|secret|token|signature|\bsig|key)[\"']?\s*[=:]", re.IGNORECASE
)
_LEAST_LENGTH = 4
"""A shorter text is no secret, and stands in unrelated words."""
_SHOWN_CHARS = 57
"""Where `describe` cuts a longer text off."""


def is_named_like_a_secret(name: str) -> bool:
    """Whether the option `name` holds a password, token, key or the like, whatever its type.

    >>> [is_named_like_a_secret(name) for name in ("password", "auth_token", "pin", "aws_access_key_id")]
    [True, True, True, True]
    >>> [is_named_like_a_secret(name) for name in ("chunk_tokens", "key_prefix", "pin_ttl", "path")]
    [False, False, False, False]
    """
    return _SECRET_NAME.search(name) is not None


def holds_credentials(text: str) -> bool:
    """Whether a text such as a URL or a connection string seems to hold credentials."""
    return _WITH_CREDENTIALS.search(text) is not None


def without_secrets(message: str, document: object) -> str:
    """`message` without the values that stand in `document` under names of secrets."""
    for text in sorted(_secret_texts(document, secret=False), key=len, reverse=True):
        for form in (repr(text)[1:-1], text, repr(text)[1:_SHOWN_CHARS]):
            message = message.replace(form, "***")
    return message


def _secret_texts(value: object, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _secret_texts(entry, secret=secret or is_named_like_a_secret(str(name)))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _secret_texts(entry, secret=secret)
    elif secret and isinstance(value, str | int | float) and not isinstance(value, bool):
        text = str(value)
        if len(text) >= _LEAST_LENGTH:
            yield text
