"""Make and check bearer tokens; the database holds only their digests."""

from __future__ import annotations

import hashlib
import secrets

from autotune.core.errors import InvalidRequestError
from autotune.store.queue import Queue, Role

# 32 random bytes cannot be guessed, so their digest needs no salt and no slow hash.
_TOKEN_BYTES = 32


def digest(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def add_token(queue: Queue, name: str, role: Role) -> str:
    """Make a token and record its digest; return it, to be shown once."""
    if not name or len(name) > 64 or not name.isprintable():
        raise InvalidRequestError(f"{name[:80]!r} is not a name for a token", "use up to 64 printable characters")
    if any(known.name == name for known in queue.tokens()):
        raise InvalidRequestError(f"there is a token named {name!r} already", "remove it first, or use another name")
    token = "at_" + secrets.token_urlsafe(_TOKEN_BYTES)
    queue.add_token(name, digest(token), role)
    return token
