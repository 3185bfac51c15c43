"""The credentials that sign requests, and the interface of a user's class that provides them (``credentialsProvider``).

The repr of `Credentials` shows only the user's name and the expiry. Follows ``SessionCredentials.java`` of 4.x and
``SessionCredentialsProvider.java`` of 5.x.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of the cluster. It is also a provider, which always returns itself."""

    access_key: str  # The user's name
    secret_key: str = field(repr=False)  # The user's password, which is never sent
    security_token: str = field(default="", repr=False)  # For a temporary user, sent unchanged
    expires_at: float | None = None  # Epoch seconds, None if unknown

    def credentials(self) -> Credentials:
        """Return these credentials."""
        return self


class CredentialsProvider(Protocol):
    """The interface of a class for ``credentialsProvider``; each client creates one instance, without arguments.

    A request that is to be signed makes a separate thread call `credentials`: the first one, one shortly before the
    last result expires (once a minute if it has no expiry), and the next one after a server has rejected the result.
    """

    def credentials(self) -> Credentials:
        """Return the credentials that sign from now on. The user sees the text of an exception."""


@runtime_checkable
class HeldCredentials(CredentialsProvider, Protocol):
    """A provider that keeps credentials, and must be notified when a server rejects them."""

    def refused(self, credentials: Credentials) -> None:
        """Handle the rejection of these credentials by a server; must not block or raise."""


def tell_refused(provider: CredentialsProvider | None, credentials: Credentials | None) -> None:
    """Notify a provider, if it has `refused`, that a server rejected its credentials."""
    if credentials is not None and isinstance(provider, HeldCredentials):
        provider.refused(credentials)


def gives_another(provider: CredentialsProvider | None, refused: Credentials) -> bool:
    """Return whether a provider returns new credentials after a rejection; CredentialsError if it returns none."""
    if not isinstance(provider, HeldCredentials):
        return False
    # A new expiry alone is no difference.
    return replace(provider.credentials(), expires_at=refused.expires_at) != refused


def without_token(text: str, signed_by: Credentials | None) -> str:
    """Return a server's text with asterisks for the token, which the server has received and may repeat."""
    token = "" if signed_by is None else signed_by.security_token
    return text.replace(token, "*" * len(token)) if token else text


def reply_without_token(reply: bytes, signed_by: Credentials | None) -> bytes:
    """Return the bytes of a reply with asterisks for the token. The fields of the reply keep their lengths."""
    token = b"" if signed_by is None else signed_by.security_token.encode("utf-8", "surrogatepass")
    return reply.replace(token, b"*" * len(token)) if token else reply
