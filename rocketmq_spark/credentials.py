"""Who signs requests: a user of the cluster, or whoever can name one at any time.

Rule 1: the secret key and the token show in no repr.
Rule 2: a user is asked for again whenever something is signed, so that temporary ones can take each other's place.
Rule 3: who has signed for a request that a server refuses is told so, if it wants to know.

Follows ``SessionCredentials.java`` of 4.x and ``SessionCredentialsProvider.java`` of 5.x.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of the cluster; as a provider, one that never changes.

    Parameters
    ----------
    access_key : str
        The user's name.
    secret_key : str
        The user's password; it never travels.
    security_token : str, default ""
        Of a temporary user; travels as it is.
    expires_at : float, optional
        Until when they are good, epoch seconds. Default: nobody knows.
    """

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str = field(default="", repr=False)
    expires_at: float | None = None

    def credentials(self) -> Credentials:
        """Return these."""
        return self


class CredentialsProvider(Protocol):
    """What a class for ``credentialsProvider`` looks like; it is made without arguments, once for each client.

    Its method is called by a thread of its own: when the first request is signed, and from then on before what it gave
    last expires, or once a minute where it does not say when that is; and at once where a server has refused that.
    """

    def credentials(self) -> Credentials:
        """Return who signs from now on; the text of an error that it raises is shown to the user."""
        ...


@runtime_checkable
class HeldCredentials(CredentialsProvider, Protocol):
    """A provider that gives the same again for a while, unless it learns that they are good no more."""

    def refused(self, credentials: Credentials) -> None:
        """Learn that a server does not take what this gave; neither blocks nor raises."""
        ...


def tell_refused(provider: CredentialsProvider | None, credentials: Credentials | None) -> None:
    """Tell a provider, if it wants to know, that a server does not take what it gave."""
    if credentials is not None and isinstance(provider, HeldCredentials):
        provider.refused(credentials)


def gives_another(provider: CredentialsProvider | None, refused: Credentials) -> bool:
    """Return whether a provider that was told of a refusal gives others now; it is waited for.

    Raises
    ------
    CredentialsError
        It gives none.
    """
    if not isinstance(provider, HeldCredentials):
        return False
    # Until when they are good is no difference.
    return replace(provider.credentials(), expires_at=refused.expires_at) != refused
