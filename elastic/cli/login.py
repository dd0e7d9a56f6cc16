"""`elastic api`: logging in to a server, and out."""

import contextlib
import hashlib
import os
import re
import secrets
import select
import socket
import sys
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from typing import Annotated, BinaryIO, cast

import typer

from elastic.cli.account import KEY_VARIABLE, Login, account_path, forget_account, save_account
from elastic.cli.options import AsJson, group
from elastic.cli.output import EXIT_INTERRUPTED, bad_input, console, emit, failed, say
from elastic.cli.remote import server
from elastic.protocol.api_client import ApiError, Client, ClientError
from elastic.system.host import here

SECRET_PREFIX = "elastic_"
LOGIN_POLL_S, LOGIN_TIMEOUT_S = 2.0, 600.0
LOGIN_PATIENCE_S = 3.0
"""A URL that was mistyped is to be said soon."""
KEY_BYTES_MAX = 4096

api = group("api", "Log in to a server.\n\nExample: elastic api login http://127.0.0.1:7430")


@api.command()
def login(
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as http://127.0.0.1:7430.")],
    with_key: Annotated[bool, typer.Option("--key", help="Ask for a key, even where people can sign in.")] = False,
) -> None:
    """Log in, and keep a key for this user alone.

    A key is taken from ELASTIC_API_KEY or a pipe. Else, where people sign in with an identity provider, a page to open
    is printed, in a browser on whatever machine, and where they do not, a key is asked for.

    Example: elastic api login http://127.0.0.1:7430
    """
    url = url if "://" in url else f"http://{url}"
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        key = "" if with_key else _signed_in_key(url)
    key = key or _asked_key()
    with _answering(url), Client(url, key.strip(), patience_s=LOGIN_PATIENCE_S) as client:
        me = client.me()
        path = save_account(Login(client.url, key.strip()))
    say(f"logged in to {client.url} as {me.name!r}, {me.role} of {me.project or 'all projects'}; kept in {path}")


@api.command()
def logout() -> None:
    """Forget the key.

    Example: elastic api logout
    """
    say(f"forgot {account_path()}" if forget_account() else "nobody was logged in")


@api.command()
def info(as_json: AsJson = False) -> None:
    """Show which server this is, and what the key may do.

    Example: elastic api info --json
    """
    with server() as client:
        version, me = client.info().version, client.me()
    if as_json:
        emit({"url": client.url, "version": version} | me.model_dump(mode="json"))
        return
    console().print(f"{client.url}  elastic {version}")
    console().print(f"key {me.name!r}, {me.role} of {me.project or 'all projects'}: {', '.join(me.actions)}")


def _asked_key() -> str:
    """The key that somebody types, or that of a pipe: a prompt would ask the terminal even then."""
    if sys.stdin and sys.stdin.isatty():
        return typer.prompt("key", hide_input=True, err=True)
    return piped_key(sys.stdin.buffer if sys.stdin else BytesIO())


def is_piped(pipe: BinaryIO, within_s: float = LOGIN_PATIENCE_S) -> bool:
    """Whether something comes by this pipe soon, which is left there."""
    with contextlib.suppress(OSError, ValueError):  # It has no descriptor.
        return bool(select.select([pipe], [], [], within_s)[0] and cast("BufferedReader", pipe).peek(1))
    return False


def piped_key(pipe: BinaryIO) -> str:
    """Return the first line, of which no more is read than a key may have. Whether it is a key, the server says."""
    line = pipe.readline(KEY_BYTES_MAX + 1)
    if len(line) > KEY_BYTES_MAX or not line.strip():
        found = f"more than {KEY_BYTES_MAX} bytes" if line.strip() else "no key"
        bad_input(f"standard input: found {found}; allowed: a key in its first line, or in {KEY_VARIABLE}")
    return line.decode(errors="replace").strip()


def _signed_in_key(url: str) -> str:
    """A key of the person who signs in on the server's page; empty where nobody can, or a key is piped.

    It is made here, and the page is told its hash alone: its secret crosses nobody's hands, and the browser may be on
    another machine.
    """
    key = SECRET_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname())[:40].strip("-._") or "terminal"
    with _answering(url):
        with Client(url, "", patience_s=LOGIN_PATIENCE_S) as client:
            if client.info().sign_in is None:
                return ""
        if sys.stdin and not sys.stdin.isatty() and is_piped(sys.stdin.buffer):
            return ""
        say(f"open {url.rstrip('/')}/#/login/{digest}/{name}")
        say(f"and confirm the code {code_of(digest)}; Ctrl-C gives up")
        ends_s = here().monotonic() + LOGIN_TIMEOUT_S
        with Client(url, key) as client:
            while not _lets_in(client):
                if here().monotonic() > ends_s:
                    bad_input(f"{url}: nobody confirmed within {LOGIN_TIMEOUT_S / 60:.0f} minutes")
                here().sleep(LOGIN_POLL_S)
            return key


@contextlib.contextmanager
def _answering(url: str) -> Iterator[None]:
    """Around what is asked of this server: whatever keeps somebody from logging in ends the program."""
    try:
        yield
    except KeyboardInterrupt:
        say("nobody was logged in")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except ApiError as error:
        bad_input(f"{url}: {error}")
    except ClientError as error:
        failed(str(error))


def _lets_in(client: Client) -> bool:
    """Whether the server knows the key by now."""
    try:
        client.me()
    except ApiError as error:
        if error.kind != "unauthenticated":
            raise
        return False
    return True


def code_of(digest: str) -> str:
    """What a terminal and the page both show, for people to compare."""
    return f"{digest[:4]}-{digest[4:8]}".upper()
