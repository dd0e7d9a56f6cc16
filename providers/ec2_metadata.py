"""What an EC2 instance can read of itself: the instance metadata service, version 2 alone.

Source: EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations".
"""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import NamedTuple, Self

import httpx

from elastic.protocol.http_clients import async_client

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The environment variable by which AWS's own clients find the service."""
ENDPOINT = "http://169.254.169.254"
TOKEN_TTL_S = 21_600
ANSWER_TIMEOUT_S = 2.0
NOTICE_S_MAX = 120.0
"""The longest notice of EC2. A longer one is an error of the instance's clock."""


class MetadataError(Exception):
    """The service gave a wrong answer. The message has the request and the answer."""


class InstanceNotice(NamedTuple):
    """A notice of the service. `left_s` is None for a rebalance recommendation, which has no deadline."""

    key: str
    left_s: float | None
    reason: str


class InstanceMetadata:
    """A client of the instance metadata service, used as a context manager."""

    def __init__(self, endpoint: str = ENDPOINT) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._http = async_client(timeout=ANSWER_TIMEOUT_S)
        self._token = ""

    @classmethod
    def of_environment(cls) -> Self:
        return cls(os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def notices(self) -> list[InstanceNotice]:
        """Return the present notices. Raises `MetadataError`."""
        found: list[InstanceNotice] = []
        if (action := await self._read("spot/instance-action")) is not None:
            at = _time(action, "time")
            left_s = min(NOTICE_S_MAX, max(0.0, at - time.time()))
            kind = str(action.get("action", "terminate"))
            found.append(InstanceNotice(f"{kind} {action.get('time')}", left_s, f"EC2 will {kind} the spot instance"))
        if (advice := await self._read("events/recommendations/rebalance")) is not None:
            key = f"rebalance {advice.get('noticeTime')}"
            found.append(InstanceNotice(key, None, "EC2 recommends to rebalance: the instance is likelier to be taken"))
        return found

    async def _read(self, path: str) -> Mapping[str, object] | None:
        """Return the JSON object at a path; None for a 404, which says that there is none."""
        answer = await self._ask("GET", f"/latest/meta-data/{path}", await self._header())
        if answer.status_code == 401:  # The token is over, or the service is another.
            self._token = ""
            answer = await self._ask("GET", f"/latest/meta-data/{path}", await self._header())
        if answer.status_code == 404:
            return None
        try:
            found = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise MetadataError(f"{self._endpoint}: {path}: {error}") from error
        if not isinstance(found, dict):
            raise MetadataError(f"{self._endpoint}: {path}: expected an object, found {type(found).__name__}")
        return found

    async def _header(self) -> Mapping[str, str]:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            answer = await self._ask("PUT", "/latest/api/token", ttl)
            if answer.status_code != 200:
                raise MetadataError(f"{self._endpoint}: no token: status {answer.status_code}")
            self._token = answer.text
        return {"X-aws-ec2-metadata-token": self._token}

    async def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> httpx.Response:
        try:
            return await self._http.request(method, self._endpoint + path, headers=headers)
        except httpx.HTTPError as error:
            raise MetadataError(f"{self._endpoint}{path}: {type(error).__name__}: {error}") from error


def _time(message: Mapping[str, object], key: str) -> float:
    """Return a time as Unix time. Raises `MetadataError`."""
    try:
        at = datetime.fromisoformat(str(message[key]).replace("Z", "+00:00"))
    except (KeyError, ValueError) as error:
        raise MetadataError(f"{key!r} is no time: {message!r}") from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
