"""Encryption of secrets in the store. The key lies in a file of the server's home that only its owner can read.

A copy of the database is useless without that file.
"""

import contextlib
import hashlib
import hmac
import os
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

KEY_FILE = "vault.key"


class VaultError(Exception):
    """A secret cannot be read: the key file is missing, or another one's."""


class Vault:
    """Encrypts and decrypts with the key in `home`, which is made when it is first needed."""

    def __init__(self, home: Path) -> None:
        self._path = home / KEY_FILE

    def sealed(self, secret: str) -> bytes:
        """Raises `VaultError`."""
        return self._fernet(make=True).encrypt(secret.encode())

    def opened(self, sealed: bytes) -> str:
        """Raises `VaultError`."""
        try:
            return self._fernet(make=False).decrypt(sealed).decode()
        except InvalidToken:
            raise VaultError(f"{self._path}: is not the key that this secret was kept under") from None

    def mark(self, secret: str) -> str:
        """Return a value that tells secrets apart, and reveals nothing without the key. Raises `VaultError`."""
        self._fernet(make=True)
        return hmac.new(self._path.read_bytes(), secret.encode(), hashlib.sha256).hexdigest()

    def _fernet(self, *, make: bool) -> Fernet:
        if make and not self._path.exists():
            # Whole or not there, and never another's: the second process uses the first one's.
            draft = self._path.with_name(f"{KEY_FILE}.{os.getpid()}.{id(self)}")
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(Fernet.generate_key())
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, self._path)
            draft.unlink()
        try:
            return Fernet(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise VaultError(f"{self._path}: cannot be read as the key of the server's secrets ({error})") from error
