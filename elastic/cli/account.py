"""Which server `--remote` means: what `elastic api login` has kept, or ELASTIC_API_URL and ELASTIC_API_KEY."""

import os
from pathlib import Path

import msgspec

from elastic.client import Client
from elastic.config import ConfigError
from elastic.files import write_whole

URL_VARIABLE, KEY_VARIABLE = "ELASTIC_API_URL", "ELASTIC_API_KEY"


class Login(msgspec.Struct, frozen=True):
    """A server and a key of it."""

    url: str
    key: str


def account_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "elastic" / "api.json"


def save_account(account: Login) -> Path:
    """Keep it for this user alone. Raises `OSError`."""
    path = account_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(account))
    return path


def forget_account() -> bool:
    """Whether there was one."""
    found = account_path().exists()
    account_path().unlink(missing_ok=True)
    return found


def account() -> Login:
    """Raises `ConfigError` where nobody is logged in."""
    url, key = os.environ.get(URL_VARIABLE, ""), os.environ.get(KEY_VARIABLE, "")
    if url and key:
        return Login(url, key)
    try:
        kept = msgspec.json.decode(account_path().read_bytes(), type=Login)
    except FileNotFoundError:
        raise ConfigError(
            f"not logged in to a server; `elastic api login URL`, or {URL_VARIABLE} and {KEY_VARIABLE}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{account_path()}: {error}; `elastic api login URL` writes it anew") from error
    return Login(url or kept.url, key or kept.key)


def connected() -> Client:
    """The server that this user is logged in to. Raises `ConfigError`."""
    found = account()
    return Client(found.url, found.key)
