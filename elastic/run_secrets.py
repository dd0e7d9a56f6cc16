"""A run's secrets, all derived from one that is kept beside it: whoever takes the run up knows them again.

Nothing of them is journaled, so that a journal can be shown around.
"""

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from pathlib import Path

from elastic.files import write_whole

FILE = "secret"
ROOT_BYTES = 32


class RunSecrets:
    """What workers, relays and hosts of one run show to be believed. `root` is the secret that all come from."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    @classmethod
    def of(cls, run_dir: Path) -> "RunSecrets":
        """Those of the run in this directory; made if it has none yet, in a file that only its owner can read.

        Raises `OSError`, and `ValueError` where the file is no secret.
        """
        path = run_dir / FILE
        try:
            root = path.read_bytes()
        except FileNotFoundError:
            root = secrets.token_bytes(ROOT_BYTES)
            write_whole(path, root)
        if len(root) != ROOT_BYTES:
            raise ValueError(f"{path}: found {len(root)} bytes; a run's secret has {ROOT_BYTES}")
        return cls(root)

    def join_token(self, worker: str) -> str:
        """With this a worker opens its session, once."""
        return self._derived("join", worker)

    def session_key(self, worker: str) -> str:
        """With this a worker resumes its session."""
        return self._derived("session", worker)

    def relay_token(self, worker: str) -> str:
        """With this a worker reads from the weights' relay."""
        return self._derived("relay", worker)

    def relay_owner(self) -> str:
        """With this the trainer may do everything there."""
        return self._derived("relay owner", "")

    def host_token(self, host: str) -> str:
        """What a serving host that the run has started wants to be shown."""
        return self._derived("host", host)

    def _derived(self, purpose: str, name: str) -> str:
        message = f"{purpose}\0{name}".encode()
        return urlsafe_b64encode(hmac.digest(self._root, message, hashlib.sha256)).rstrip(b"=").decode()
