"""Who asks: keys in all their places, and which name counts."""

import base64

import pytest
from starlette.datastructures import Headers

from elastic.front.destinations import FORWARDED
from elastic.front.keys import NamedInPath, find_caller, split
from elastic.front.openapi import AGENTS, OPERATIONS
from elastic.front.readers import READERS
from elastic.protocol.front_messages import NAME_MAX, AgentCaller
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.run_secrets import RunSecrets
from tests.front.fronted import AGENT, DRIVER, SECRETS, bearer
from tests.front.modelled_run import TRAJECTORY

OWN = AgentCaller(trajectory=TRAJECTORY, restart=1)


ROUTES = {path for (path, _), operation in OPERATIONS.items() if operation.tag == AGENTS} | {*READERS, *FORWARDED}


@pytest.mark.parametrize("route", sorted(route.replace("{name}", "org/solver") for route in ROUTES))
def test_each_route_of_agents_is_there_behind_a_name(route):
    assert split(f"/t/2/5/0{route}") == (NamedInPath("/t/", "2/5/0"), route)
    assert split(f"/sessions/a/b{route}/") == (NamedInPath("/sessions/", "a/b"), route)
    assert split(route) == (NamedInPath(), route)


def basic(user: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def caller(headers: dict[str, str], path: str = "/v1/chat/completions", session: str = "") -> AgentCaller:
    return find_caller(SECRETS, Headers(headers), split(path)[0], session)


@pytest.mark.parametrize(
    ("path", "named", "route"),
    [
        ("/v1/chat/completions", ("", ""), "/v1/chat/completions"),
        ("/v1/chat/completions/", ("", ""), "/v1/chat/completions"),
        ("/t/2-5-0/v1/completions//", ("/t/", "2-5-0"), "/v1/completions"),
        ("/sessions/a/b/v1/models", ("/sessions/", "a/b"), "/v1/models"),
        ("/sessions/v1/models", ("", ""), "/sessions/v1/models"),
        ("/t//inference/v1/generate", ("", ""), "/t//inference/v1/generate"),
        ("/t/x/inference/v1/generate", ("/t/", "x"), "/inference/v1/generate"),
        ("/t/x/health", ("/t/", "x"), "/health"),
        ("/t/x/trajectories", ("", ""), "/t/x/trajectories"),
        ("/", ("", ""), "/"),
        ("", ("", ""), "/"),
    ],
)
def test_what_a_path_names(path, named, route):
    assert split(path) == (named, route)


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        (bearer(AGENT), "/v1/models"),
        ({"authorization": f"bearer  {AGENT} "}, "/v1/models"),
        ({"x-api-key": AGENT}, "/v1/models"),
        (basic("run", AGENT), "/v1/models"),
        (basic(AGENT, ""), "/v1/models"),
        ({}, f"/t/{AGENT}/v1/models"),
        ({}, f"/sessions/{AGENT}/v1/models"),
        (bearer("EMPTY"), f"/t/{AGENT}/v1/models"),
        (bearer("EMPTY") | {"x-api-key": AGENT}, "/v1/models"),
        (bearer(DRIVER), f"/t/{AGENT}/v1/models"),
        (bearer(AGENT), "/t/2-5-0/v1/models"),
        (bearer(AGENT) | {"x-session-id": "ses_of_a_harness"}, "/sessions/ses/v1/models"),
    ],
)
def test_a_trajectory_key_counts_wherever_it_stands(headers, path):
    assert caller(headers, path, "of the body") == OWN


@pytest.mark.parametrize(
    ("path", "header", "session", "named"),
    [
        ("/t/2-5-1/v1/models", "header", "body", "2-5-1"),
        ("/sessions/a/b/v1/models", "header", "body", "a/b"),
        ("/v1/models", "header", "body", "header"),
        ("/v1/models", None, "body", "body"),
        ("/v1/models", None, "", ""),
    ],
)
def test_a_driver_names_by_path_then_header_then_body(path, header, session, named):
    headers = bearer(DRIVER) | ({} if header is None else {"x-session-id": header})
    assert caller(headers, path, session) == AgentCaller(driver="tests", named=named)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("agent.2-5-0.1.wrong"),
        bearer(AGENT[:-1]),
        bearer(RunSecrets(b"o" * 32).agent_key(TRAJECTORY, 1)),
        bearer(RunSecrets(b"o" * 32).driver_key("tests")),
        {"authorization": "Basic ///"},
        {"authorization": "Basic " + base64.b64encode(b"\xff\xfe").decode()},
        {"authorization": "Digest x"},
        {"x-api-key": "é"},
    ],
)
def test_no_key_of_this_run_is_a_401(headers):
    with pytest.raises(FrontError) as refused:
        caller(headers, "/t/2-5-0/v1/models", "body")
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_a_key_reads_nothing_of_another_trajectory():
    with pytest.raises(FrontError) as refused:
        caller(bearer(AGENT), "/t/2-5-1/v1/models")
    assert refused.value.status == 403
    other = SECRETS.agent_key("2/5/1", 0)
    with pytest.raises(FrontError) as refused:
        caller(bearer(AGENT), f"/t/{other}/v1/models")
    assert refused.value.status == 403


def test_a_name_that_is_too_long_is_nobodys():
    with pytest.raises(FrontError) as refused:
        find_caller(SECRETS, Headers(bearer(DRIVER)), NamedInPath("/sessions/", "x" * (NAME_MAX + 1)))
    assert refused.value.status == 404
