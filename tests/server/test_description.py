"""The API's description is complete: an example for every body, a documented type for every error."""

import json
import re
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import Route

import elastic.protocol.api
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.problems import MEDIA_TYPE, TYPES
from tests.server.conftest import Site
from tests.server.test_access import OPEN, SIGN_IN, operations

PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def test_routes_are_built_before_the_first_request(shared_site: Site) -> None:
    """What `include_router` adds is built by the first request, which others wait for."""
    assert {type(route) for route in shared_site.app.routes} == {APIRoute, ModelRoute, Route}


def test_examples_are_what_their_models_allow(shared_site: Site) -> None:
    shown: dict[str, Any] = {}
    for _, _, operation in operations(shared_site):
        for body in (operation.get("requestBody", {}), *operation["responses"].values()):
            said = body.get("content", {}).get("application/json", {})
            name = str(said.get("schema", {}).get("$ref", "")).rpartition("/")[2]
            if listed := re.fullmatch("Listed(?:OfRun)?_(.+)_", name):
                (shown[listed[1]],) = said["example"]["data"]
            elif name:
                shown[name] = said["example"]
    for name, example in shown.items():
        model = getattr(elastic.protocol.api, name)
        read = model.model_validate_json(json.dumps(example)).model_dump(mode="json", exclude_unset=True)
        hidden = dict.fromkeys([key for key, value in read.items() if value == "**********"], "**********")
        assert read == {**example, **hidden}
    assert {"HostedRunDetail", "Submission", "ApiKey", "NewWebhook"} <= shown.keys()


def test_every_body_has_an_example(shared_site: Site) -> None:
    for method, path, operation in operations(shared_site):
        bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
        for content in (content for body in bodies for content in body.get("content", {}).items()):
            media_type, said = content
            if media_type in ("application/json", MEDIA_TYPE) and said.get("schema", {}) != {}:
                assert said.get("example") is not None or said.get("examples"), (method, path, said)


def test_every_error_is_a_documented_problem(shared_site: Site) -> None:
    for method, path, operation in operations(shared_site):
        for status, response in operation["responses"].items():
            if status[0] in "45" and path not in OPEN:
                kinds = response["content"][MEDIA_TYPE]["examples"]
                assert all(TYPES[kind].status == int(status) for kind in kinds), (method, path, status)
        if path not in OPEN | SIGN_IN:
            assert {"400", "401", "403", "500", "503"} <= operation["responses"].keys(), (method, path)
        assert operation["summary"], (method, path)
        assert operation.get("description"), (method, path)
    said: dict[str, Any] = shared_site.app.openapi()
    assert "HTTPValidationError" not in json.dumps(said)


def test_the_page_has_every_type() -> None:
    told = set(re.findall(r"^\| `([a-z-]+)` \| \d+ \|", PAGE.read_text(), re.MULTILINE))
    assert told == set(TYPES)
