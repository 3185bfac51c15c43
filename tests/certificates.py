"""Certificates for tests of TLS: an authority, and servers and clients that it vouches for."""

from __future__ import annotations

import ssl
import warnings
from datetime import datetime, timedelta, timezone

from rocketmq_spark.cluster import certificates
from rocketmq_spark.cluster.certificates import Certificate

NOW = datetime.now(timezone.utc).replace(tzinfo=None)
YESTERDAY, TOMORROW = NOW - timedelta(days=1), NOW + timedelta(days=1)


class Authority(certificates.Authority):
    """A certificate authority of its own; its files are in a folder of the test's."""

    def server(self, name: str, names: str, **valid: datetime) -> Certificate:
        """Return the files of a certificate and its key for `names`, as in ``DNS:localhost,IP:127.0.0.1``.

        A client's is made alike. `valid` is ``not_before=TOMORROW`` or ``not_after=YESTERDAY``, if not always.
        """
        return self.issue(name, *(one.partition(":")[2] for one in names.split(",")), **valid)

    def context(self, name: str, names: str, **valid: datetime) -> ssl.SSLContext:
        """Return the context of a server for `names`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.server(name, names, **valid))
        return context

    def outdated(self, name: str, names: str) -> ssl.SSLContext:
        """Return the context of a server for `names` that speaks nothing newer than TLS 1.1."""
        context = self.context(name, names)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        return context
