"""Read the host name of an HTTP request, to refuse pages whose name was made to point here (DNS rebinding)."""

from __future__ import annotations

from typing import Final

# Names of this machine that no DNS server can point elsewhere.
OWN_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


def host_name(host: str) -> str:
    """Return the host of a ``Host`` header without its port: ``localhost`` for ``localhost:8080``."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
