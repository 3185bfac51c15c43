"""The credentials that sign requests, and the interface of a user's class that provides them (``credentialsProvider``).

No repr shows a secret. Follows ``SessionCredentials.java`` of 4.x and ``SessionCredentialsProvider.java`` of 5.x.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of the cluster, and the provider that always returns this user."""

    access_key: str  # The user's name
    secret_key: str = field(repr=False)  # The user's password, which is never sent
    security_token: str = field(default="", repr=False)  # For a temporary user, sent unchanged
    expires_at: float | None = None  # Epoch seconds, None if unknown

    def credentials(self) -> Credentials:
        """Return these credentials."""
        return self


class CredentialsProvider(Protocol):
    """The interface of a class for ``credentialsProvider``; each client creates it once, without arguments.

    A separate thread calls `credentials`: when the first request is signed, before the last result expires (once a
    minute if it has no expiry), and as soon as a server rejects it.
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
