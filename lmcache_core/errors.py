"""The errors this project raises. All of them pickle, and none carries a secret."""

from __future__ import annotations

from typing import Any


class LMCacheError(Exception):
    """Base of every error raised by lmcache_core and its plugins."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class ConfigError(LMCacheError):
    """The configuration can't be used; the message names the key, the fault and the remedy."""


class PluginError(LMCacheError):
    """A plugin could not be loaded, or does not keep the contract it declares."""


class UnsupportedModel(LMCacheError):
    """The model was refused at attach: its KV can't be proved to belong to its tokens."""


class PoolFull(LMCacheError):
    """No memory became free before the deadline; the caller skips its store or load."""


class LeaseError(LMCacheError):
    """A lease, hold or pin was used against its rules: released twice, or used after release."""


class BackendError(LMCacheError):
    """A backend operation failed.

    `backend` is the tier's name, `op` the operation (`put`, `get`, `stat`, …), `key` the storage key
    where one item is to blame. `retryable` says that the same call may succeed later unchanged.
    """

    retryable_by_default = False

    def __init__(
        self,
        message: str,
        *,
        backend: str = "",
        op: str = "",
        key: str = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.op = op
        self.key = key
        self.retryable = self.retryable_by_default if retryable is None else retryable

    def __str__(self) -> str:
        where = " ".join(part for part in (self.backend, self.op, self.key) if part)
        return f"{where}: {self.args[0]}" if where else str(self.args[0])


class BackendUnavailable(BackendError):
    """The store can't be reached or is not usable now."""

    retryable_by_default = True


class BackendClosed(BackendError):
    """The backend was closed, here or while the call ran."""


class DeadlineExceeded(BackendError):
    """The call's deadline passed. Whether a write took effect is unknown."""

    retryable_by_default = True


class NotSupported(BackendError):
    """The operation was not declared in the backend's capabilities."""


class Corrupt(BackendError):
    """Bytes are not what was stored under this key: wrong checksum, key, part or shape."""


class PermissionDenied(BackendError):
    """Credentials, an access rule or file permissions refuse the operation."""


def _rebuild(cls: type[LMCacheError], args: tuple[Any, ...], state: dict[str, Any]) -> LMCacheError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error
