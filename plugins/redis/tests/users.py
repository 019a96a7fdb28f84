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
KEYS = f"~{NAMESPACES}*[.:]*"
"""How every namespace of the tests begins, and the keys that belong to one."""
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def rights(start: str, end: str) -> tuple[str, ...]:
    """The rights that the README says a user needs, between these two texts."""
    return tuple(word for word in README.partition(start)[2].partition(end)[0].split() if word[0] == "+")


RULE = rights("user kv on >PASSWORD ~lmcache[.:]* ", "\n")
PINS_RULE = rights("With `pin` also `", "`")
CLUSTER_RULE = rights("in a cluster `", "`")


def users(rule: Sequence[str]) -> list[str]:
    """Lines of an ACL file: the tier, and two that may do less."""
    return [
        f"user {name} on >{password} {KEYS} {' '.join(may)}"
        for name, password, may in (
            (TIER, TIER_PASSWORD, rule),
            (NARROW, NARROW_PASSWORD, (*rule, "-scan")),
            (KEEPER, KEEPER_PASSWORD, (*rule, "-unlink")),
        )
    ]


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
