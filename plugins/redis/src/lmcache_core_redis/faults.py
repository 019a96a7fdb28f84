"""What a server or a connection answers when it can't do what was asked, as outcomes and typed errors."""

from __future__ import annotations

from collections.abc import Sequence

from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as DriverTimeoutError

from lmcache_core.sdk import (
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    Outcome,
    PermissionDenied,
    Secret,
    Status,
)
from lmcache_core_redis.resp import ServerError

_PASSING = {
    "LOADING": "it is loading its data",
    "CLUSTERDOWN": "the cluster is down",
    "TRYAGAIN": "the slot is being moved",
    "MOVED": "the slot was moved, more than once during this call",
    "ASK": "the slot is being moved",
    "MASTERDOWN": "its link to the primary is down",
    "NOREPLICAS": "too few replicas follow it",
    "BUSY": "a script keeps it busy",
    "MISCONF": "it can't save to disk and refuses writes; see stop-writes-on-bgsave-error",
}


_ARGUMENTS = ", with args beginning with"


class Where:
    """Names the server and the user in messages, and never the password."""

    def __init__(
        self,
        node: object,
        user: str,
        namespace: str,
        *,
        cluster: bool,
        sentinel: str | None,
        secrets: Sequence[Secret | None],
    ) -> None:
        self._secrets = secrets
        self._cluster = cluster
        self._sentinel = sentinel
        self._server = f"redis server {node}"
        self._user = user
        self._namespace = namespace

    def of_server(self, error: ServerError) -> BackendError:
        """`error`, which the server answered, as ours."""
        code, text = error.code, self._shown(error)
        if code in ("MOVED", "ASK", "CROSSSLOT") and not self._cluster:
            return BackendError(f"{self._server} is a node of a cluster: set `cluster: true`")
        if code in _PASSING:
            return BackendUnavailable(f"{self._server}: {_PASSING[code]} ({text})")
        if code == "OOM":
            return BackendUnavailable(
                f"{self._server} is full and evicts nothing: raise maxmemory or set a maxmemory-policy"
            )
        if code in ("NOAUTH", "WRONGPASS"):
            return PermissionDenied(
                f"{self._server} refuses user {self._user}: set `username` and `password` ({text})"
            )
        if code == "NOPERM" or "user executing the script can't" in text:  # so Redis 7.0 says it
            return PermissionDenied(
                f"{self._server} forbids user {self._user} something; its ACL needs "
                f"~{self._namespace}[.:]* and the commands that the README lists ({text})"
            )
        if code == "READONLY" and (self._cluster or self._sentinel is not None):
            return BackendUnavailable(f"{self._server} is not the primary any more; it is being looked for")
        if code == "READONLY":
            return PermissionDenied(
                f"{self._server} is a read-only replica: point `url` at the primary, or name the `sentinel`"
            )
        if self._sentinel is not None and "unknown command" in text and "SENTINEL" in text.upper():
            return BackendError(
                f"{self._server} is no Sentinel: leave `sentinel` out, or give theirs in `url`"
            )
        if "max number of clients" in text:
            return BackendUnavailable(f"{self._server} has no connection left: raise maxclients")
        if "AUTH" in text and "password" in text:
            return PermissionDenied(f"{self._server} has no password: leave `password` out ({text})")
        return BackendError(f"{self._server} answered: {text}")

    def outcome(self, error: ServerError, op: str) -> Outcome:
        """How an item ends to which the server answered `error`."""
        if error.code == "OOM" and op == "put":
            return Outcome(status=Status.FULL)
        if error.code == "WRONGTYPE" and op != "put":
            return Outcome(status=Status.MISS)  # something foreign, which a put replaces
        return Outcome(status=Status.FAILED, error=self.of_server(error))

    def of_connection(self, error: Exception) -> BackendError:
        """`error`, which ended a connection or kept one from being made, as ours."""
        if isinstance(error, ServerError):
            return self.of_server(error)
        if isinstance(error, InvalidResponse):
            return BackendUnavailable(
                f"{self._server} doesn't speak the Redis protocol: {self._shown(error)}; "
                "does it want rediss:// (TLS)?"
            )
        if isinstance(error, BackendError):
            if not str(error.args[0]).startswith(self._server):
                error.args = (f"{self._server}: {error.args[0]}",)
            return error
        if isinstance(error, TimeoutError | DriverTimeoutError):
            return DeadlineExceeded(f"{self._server} doesn't answer in time")
        assert isinstance(error, OSError | RedisError)
        return BackendUnavailable(f"can't reach {self._server}: {self._shown(error)}")

    def _shown(self, error: Exception) -> str:
        """What it says, without what a server may repeat that doesn't know AUTH: its arguments."""
        text = str(error).partition(_ARGUMENTS)[0]
        for secret in self._secrets:
            if secret is not None:
                text = text.replace(secret.reveal(), "…")
        return text
