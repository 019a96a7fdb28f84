"""Foreign errors made ours: wrapped in the narrowest class, told apart by errno and HTTP status, stripped."""

from __future__ import annotations

import errno
import logging
import threading

from lmcache_core.errors import (
    BackendClosed,
    BackendError,
    BackendUnavailable,
    PermissionDenied,
)
from lmcache_core.storage.contract import Outcome, Status

log = logging.getLogger(__name__)

MAX_FOREIGN_CHARS = 500

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is the user's Ctrl-C, which the caller must see: it comes to the main thread alone.

    What else isn't an Exception (CancelledError, SystemExit) ends no thread of ours.
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def strip_traceback(error: BaseException) -> BaseException:
    """Cuts tracebacks, causes and contexts off `error` and returns it.

    A traceback keeps every local of its frames alive, views included, and so does a driver's own
    exception; an error that is kept must keep no memory.
    """
    error.__traceback__ = None
    error.__cause__ = None
    error.__context__ = None
    return error


def wrapped(
    error: BaseException, *, tier: str, op: str, key: str = "", closing: bool = False
) -> BackendError:
    """`error` as a stripped BackendError that names tier, operation and key; its traceback is logged (debug).

    With `closing`, what isn't already precise becomes BackendClosed: the call was woken on purpose. Foreign
    errors run code of their own when they are looked at: one that then raises becomes a plain BackendError.
    """
    try:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s %s %s failed", tier, op, key, exc_info=error)
        ours = _ours(error, closing)
        strip_traceback(error)
        ours.backend = ours.backend or tier
        ours.op = ours.op or op
        ours.key = ours.key or key
        str(ours), ours.retryable  # as those will who get it
        return ours
    except BaseException as fault:  # recorded boundary: a foreign error's own code
        if is_interrupt(fault):
            raise
        message = f"{type(error).__name__} (an error that can't be looked at)"
        return BackendError(message, backend=tier, op=op, key=key)


def failed(error: BackendError) -> Outcome:
    return Outcome(status=Status.FAILED, error=error)


def status_for_errno(code: int | None, message: str = "", *, op: str = "") -> Outcome:
    """The outcome that an OSError's errno stands for in operation `op` (`put`, `get`, `stat`, `delete`).

    Absent files are MISS except for a put, no room is FULL for a put; all else is FAILED with
    PermissionDenied, BackendUnavailable (try again) or a BackendError that is not retryable.
    """
    if code in _ABSENT and op != "put":
        return Outcome(status=Status.MISS)
    if code in _NO_ROOM and op in ("", "put"):
        return Outcome(status=Status.FULL)
    message = message or (errno.errorcode.get(code, f"errno {code}") if code is not None else "no errno")
    return failed(_os_error(code, message) or BackendError(message))


def status_for_http(code: int, message: str = "", *, op: str = "") -> Outcome:
    """The outcome that an HTTP status stands for in operation `op`; OK comes without `nbytes`."""
    if 200 <= code < 300:
        return Outcome(status=Status.OK)
    if code in (404, 410, 416) and op != "put":
        return Outcome(status=Status.MISS)
    if code == 507 and op in ("", "put"):
        return Outcome(status=Status.FULL)
    message = message or f"HTTP status {code}"
    if code in (401, 403, 407):
        return failed(PermissionDenied(message))
    if code in (408, 425, 429, 500, 502, 503, 504):
        return failed(BackendUnavailable(message))
    return failed(BackendError(message))


def describe(error: BaseException) -> str:
    """Class and message of a foreign error, in bounded length. Survives exceptions that can't be printed."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (recorded boundary: a foreign __str__)
        return f"{name} (its message can't be printed)"
    if len(text) > MAX_FOREIGN_CHARS:
        text = f"{text[:MAX_FOREIGN_CHARS]}…"
    return f"{name}: {text}" if text else name


def _ours(error: BaseException, closing: bool) -> BackendError:
    """The narrowest of our errors for `error`, which is kept where it is one."""
    if isinstance(error, BackendError) and not closing:
        return error
    message = describe(error)
    if closing:
        return BackendClosed(f"closed while the call ran ({message})")
    if isinstance(error, OSError):
        known = _os_error(error.errno, message)
        if known is not None:
            return known
        if isinstance(error, TimeoutError | ConnectionError):
            return BackendUnavailable(message)
    return BackendError(message)


def _os_error(code: int | None, message: str) -> BackendError | None:
    if code in _REFUSED:
        return PermissionDenied(message)
    if code in _TRANSIENT:
        return BackendUnavailable(message)
    return None
