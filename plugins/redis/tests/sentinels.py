"""A primary, a replica and one Sentinel that watches them, without a proxy."""

from __future__ import annotations

from typing import Any

import redis

from .servers import ADMIN, ADMIN_PASSWORD, Server
from .sites import wait_until
from .users import RULE, TIER, TIER_PASSWORD, users

GROUP = "group"
DOWN_AFTER_MS = 300
ELECTED_S = 20.0
SENTINEL_USER, SENTINEL_PASSWORD = "asks", "the-sentinel"


class SentinelSite:
    """The primary is found by the Sentinel, and fails over when it is killed."""

    def __init__(self, binary: str) -> None:
        self.primary = self._server(binary, {})
        self.primary.start()
        self.replica = self._server(binary, {"replicaof": f"127.0.0.1 {self.primary.port}"})
        self.replica.start()
        self.sentinel = Server(
            binary,
            sentinel=True,
            settings={
                "sentinel monitor": f"{GROUP} 127.0.0.1 {self.primary.port} 1",
                "sentinel auth-user": f"{GROUP} {ADMIN}",
                "sentinel auth-pass": f"{GROUP} {ADMIN_PASSWORD}",
                "sentinel down-after-milliseconds": f"{GROUP} {DOWN_AFTER_MS}",
                "sentinel failover-timeout": f"{GROUP} 2000",
            },
            users=[f"user {SENTINEL_USER} on >{SENTINEL_PASSWORD} +auth +client +hello +sentinel"],
        )
        self.sentinel.start()
        wait_until(self._replica_is_known, ELECTED_S)

    def options(self, namespace: str) -> dict[str, object]:
        return {
            "url": f"redis://127.0.0.1:{self.sentinel.port}",
            "sentinel": GROUP,
            "sentinel_username": SENTINEL_USER,
            "sentinel_password": SENTINEL_PASSWORD,
            "username": TIER,
            "password": TIER_PASSWORD,
            "namespace": namespace,
        }

    def fail_over(self) -> None:
        """Kills the primary, and returns when the replica has taken its place."""
        self.primary.kill()
        wait_until(self._replica_is_primary, ELECTED_S)

    def _server(self, binary: str, settings: dict[str, object]) -> Server:
        replication = {"masteruser": ADMIN, "masterauth": ADMIN_PASSWORD, "repl-diskless-sync-delay": 0}
        return Server(binary, settings={**settings, **replication}, users=users(RULE))

    def _replica_is_known(self) -> bool:
        told = self._ask("SENTINEL", "REPLICAS", GROUP)
        up = _info(self.replica.client(), "replication")["master_link_status"] == "up"
        return up and [replica["flags"] for replica in told] == ["slave"]  # neither down nor lost

    def _replica_is_primary(self) -> bool:
        _, port = self._ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", GROUP)
        try:
            role = _info(self.replica.client(), "replication")["role"]
        except redis.ConnectionError:  # the Sentinel ends every connection to what it promotes
            return False
        return int(port) == self.replica.port and bool(role == "master")

    def _ask(self, *command: str) -> Any:
        return self.sentinel.client(decode_responses=True).execute_command(*command)


def _info(client: redis.Redis, section: str) -> dict[str, Any]:
    told: dict[str, Any] = client.info(section)
    return told
