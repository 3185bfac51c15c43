"""Who asks: the ext fields that sign a request.

Rule 1: the signature covers the value of every other ext field, in the order of the fields' names, and then the body;
        neither names nor code, opaque or remark.
Rule 2: a body in pieces is hashed piece by piece, never joined.
Rule 3: the secret key and the token show in no error.

Follows ``AclClientRPCHook.java``, ``AclUtils.java``, ``AclSigner.java`` (spec/remoting.md section 15).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable, Mapping
from typing import Final

from rocketmq_spark.credentials import Credentials
from rocketmq_spark.message import Buffer

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"


def signed(ext_fields: Mapping[str, str], body: Iterable[Buffer], credentials: Credentials) -> dict[str, str]:
    """Return the ext fields with AccessKey, SecurityToken (if there is one) and Signature.

    Parameters
    ----------
    ext_fields : mapping of str to str
        Left as they are.
    body : iterable of buffers
        The request's body, as it will be sent.
    credentials : Credentials

    Returns
    -------
    dict of str to str
    """
    fields = {**ext_fields, ACCESS_KEY: credentials.access_key}
    if credentials.security_token:
        fields[SECURITY_TOKEN] = credentials.security_token
    fields.pop(SIGNATURE, None)
    content = "".join(fields[name] for name in sorted(fields))
    # Text that is not Unicode passes: an error would hold it, secrets included. Encoding the header refuses it.
    secret_key = credentials.secret_key.encode("utf-8", "surrogatepass")
    digest = hmac.new(secret_key, content.encode("utf-8", "surrogatepass"), "sha1")
    for piece in body:
        digest.update(piece)
    fields[SIGNATURE] = base64.b64encode(digest.digest()).decode()
    return fields
