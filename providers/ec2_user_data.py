"""What an EC2 instance is told at its start: to be a worker until the lease ends, and then to end itself.

- The instance ends (its shutdown behaviour is to terminate) whenever its worker does, however that comes about, after
  its longest life in any case, and early if it does not come to start its worker: nothing goes on because somebody was
  not there to end it.
- The ticket is the worker's token, spent on first use and void with its lease. It stands in the user data, which
  everybody who may read the instance's attributes can see; or only the name of a secret does, which the instance reads
  by its profile.
"""

import shlex
from collections.abc import Mapping, Sequence

LIMIT_BYTES = 16_384
"""EC2's, before base64."""
TOKEN_VARIABLE = "ELASTIC_JOIN_TOKEN"
NOTICES_VARIABLE = "ELASTIC_NOTICES"
"""The environment variable that names who gives notices to a worker: "ec2", or nobody."""

_SCRIPT = """\
#!/bin/bash
# A worker of Elastic; this instance ends with it.
trap 'shutdown -h now' EXIT
shutdown -h +{install_minutes}
umask 077
{exports}
{install}
{fetch}
shutdown -c
shutdown -h +{life_minutes}
elastic worker
"""


class UserDataTooLarge(ValueError):
    pass


def user_data(
    environment: Mapping[str, str],
    install: Sequence[str],
    life_s: float,
    *,
    install_s: float = 1800.0,
    secret: str = "",
    region: str = "",
) -> str:
    """The script. With a `secret`, the token is read from Secrets Manager there. Raises `UserDataTooLarge`."""
    told = {name: value for name, value in environment.items() if not (secret and name == TOKEN_VARIABLE)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (told | {NOTICES_VARIABLE: "ec2"}).items()]
    fetch = (
        f"export {TOKEN_VARIABLE}=$(aws --region {shlex.quote(region)} secretsmanager get-secret-value "
        f"--secret-id {shlex.quote(secret)} --query SecretString --output text) || exit 1"
        if secret
        else ""
    )
    script = _SCRIPT.format(
        install_minutes=max(1, round(install_s / 60)),
        life_minutes=max(1, round(life_s / 60)),
        exports="\n".join(exports),
        install="\n".join(f"{line} || exit 1" for line in install),
        fetch=fetch,
    )
    size = len(script.encode())
    if size > LIMIT_BYTES:
        raise UserDataTooLarge(f"user data has {size} bytes; EC2 takes {LIMIT_BYTES}: shorten `install`")
    return script
