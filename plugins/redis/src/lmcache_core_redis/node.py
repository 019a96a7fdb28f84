"""Where a server is: an address, and the addresses that a URL names."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class Node:
    """A server's address: a host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Servers:
    """What a URL says. `nodes` isn't empty."""

    nodes: tuple[Node, ...]
    db: int
    tls: bool


def parse_url(url: str) -> Servers:
    """
    Raises:
        ValueError: not a URL that this backend takes. The message doesn't repeat it: it may hold a password.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in ("redis", "rediss", "unix"):
        raise ValueError("url: must begin with redis://, rediss:// or unix://")
    try:
        parts = urlsplit(url)
    except ValueError:  # which may repeat it
        raise ValueError("url: its host can't be read; write redis://host:6379/0") from None
    if "@" in parts.netloc:
        raise ValueError("url: leave the user out; set `username` and `password`, which are never shown")
    if parts.query or parts.fragment:
        raise ValueError("url: takes no '?' or '#'; what can be set has an option of its own")
    if scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError("url: a unix socket is given as unix:///path/to/socket")
        return Servers((Node(path=unquote(parts.path)),), 0, False)
    nodes = tuple(_node(text) for text in parts.netloc.split(","))
    return Servers(nodes, _database(parts.path), scheme == "rediss")


def parse_node(text: str) -> Node:
    """`host:port` as a server reports it, IPv6 addresses with or without brackets.

    Raises:
        ValueError: not that.
    """
    host, _, port = text.rpartition(":")
    node = Node(host.removeprefix("[").removesuffix("]"), int(port))
    if not 0 < node.port < 65536:
        raise ValueError(f"no port: {port}")
    return node


def _node(text: str) -> Node:
    has_port = ":" in text.rpartition("]")[2]
    try:
        node = parse_node(text if has_port else f"{text}:{DEFAULT_PORT}")
    except ValueError:
        node = Node()
    if not node.host:
        raise ValueError("url: hosts are written host or host:port, parted by commas")
    return node


def _database(path: str) -> int:
    text = path.strip("/")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise ValueError("url: what follows the host must be the number of a database, such as /0")
    return int(text)
