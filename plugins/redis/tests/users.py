"""Who may do what on the tests' servers, and the certificates of those that speak TLS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIER, TIER_PASSWORD = "tier", "the-tiers-own-password"
NARROW, NARROW_PASSWORD = "narrow", "may-not-list"
KEEPER, KEEPER_PASSWORD = "keeper", "may-not-remove"
WRONG_PASSWORD = "known-to-nobody"
NAMESPACES = "tests-"
"""How every namespace of the tests begins."""
RULE = (
    *("+ping", "+hello", "+auth", "+select", "+client", "+info", "+cluster|slots", "+asking"),
    *("+hget", "+hmget", "+hlen", "+exists", "+scan", "+multi", "+exec", "+eval", "+time"),
    *("+hset", "+unlink", "+rename", "+persist", "+pexpire"),
    *("+zadd", "+zscore", "+zrem", "+zrangebyscore"),
)
NARROW_RULE = (*RULE, "-scan")
KEEPER_RULE = (*RULE, "-unlink")


def user_line(name: str, password: str, rule: Sequence[str], pattern: str = f"~{NAMESPACES}*") -> str:
    """A line of an ACL file."""
    return f"user {name} on >{password} {pattern} {' '.join(rule)}"


USERS = (
    user_line(TIER, TIER_PASSWORD, RULE),
    user_line(NARROW, NARROW_PASSWORD, NARROW_RULE),
    user_line(KEEPER, KEEPER_PASSWORD, KEEPER_RULE),
)


@dataclass(frozen=True)
class Certificates:
    """Files of one authority, one server and one client."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    import trustme

    authority = trustme.CA()
    names = ("ca", "server", "server-key", "client", "client-key")
    made = Certificates(*(folder / f"{name}.pem" for name in names))
    authority.cert_pem.write_to_path(made.authority)
    for certificate, file, key in (
        (authority.issue_cert("127.0.0.1", "localhost"), made.server, made.server_key),
        (authority.issue_cert("tier@client.invalid"), made.client, made.client_key),
    ):
        file.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(key)
    return made
