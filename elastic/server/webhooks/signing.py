"""Signatures as Standard Webhooks 1.1 has them. Pure but for chance."""

import base64
import hashlib
import hmac
import secrets

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def signed_headers(secret: str, delivery: str, unix_s: int, body: bytes) -> dict[str, str]:
    """The headers that a receiver knows the message by: its id, its time, and the signature over both and the body."""
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    signature = hmac.digest(key, f"{delivery}.{unix_s}.".encode() + body, hashlib.sha256)
    return {
        "webhook-id": delivery,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }
