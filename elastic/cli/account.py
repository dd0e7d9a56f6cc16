"""Which server `--remote` means: what `elastic api login` has kept, or ELASTIC_API_URL and ELASTIC_API_KEY."""

import os
from pathlib import Path

import msgspec

from elastic.config import ConfigError
from elastic.runtime.journal import DirectoryStore, RunDirectory
from elastic.system.files import write_whole

URL_VARIABLE, KEY_VARIABLE = "ELASTIC_API_URL", "ELASTIC_API_KEY"


class Login(msgspec.Struct, frozen=True):
    """A server and a key of it."""

    url: str
    key: str


def account_path() -> Path:
    """Where a login is kept. Raises `ConfigError` for a user without a home directory."""
    if path := _account_path():
        return path
    raise ConfigError(
        "there is no home directory in which a login is kept: set HOME or XDG_CONFIG_HOME, or "
        f"{URL_VARIABLE} and {KEY_VARIABLE}"
    )


def _account_path() -> Path | None:
    if base := os.environ.get("XDG_CONFIG_HOME"):
        return Path(base) / "elastic" / "api.json"
    try:
        return Path.home() / ".config" / "elastic" / "api.json"
    except RuntimeError:
        return None


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


def run_on_disk(directory: Path, name: str, *, simulated: bool = False) -> RunDirectory:
    """As in `DirectoryStore`. Raises `ConfigError`, which says where else the run may be."""
    try:
        return DirectoryStore(directory).find(name, simulated=simulated)
    except ConfigError as error:
        raise ConfigError(or_remote(str(error))) from None


def or_remote(words: str) -> str:
    """These words about what is not on disk, and for who is logged in where else it may be."""
    path = _account_path()
    return words if path is None or not path.exists() else f"{words}; for runs on the server: --remote"
