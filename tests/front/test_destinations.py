"""Where calls go by the name of their model."""

import pytest

from elastic.front.destinations import ModelNames, ToRun, ToUpstream, destination
from elastic.protocol.openai.errors import FrontError

CHAT = "/v1/chat/completions"
ALONE = ModelNames("small", ("solver", "critic"))
BESIDE = ALONE._replace(upstream=True)


@pytest.mark.parametrize("names", [ALONE, BESIDE])
@pytest.mark.parametrize(
    ("asked", "policy"), [(None, ""), ("", ""), ("small", ""), ("solver", "solver"), ("critic", "critic")]
)
def test_the_runs_names_are_the_runs(names, asked, policy):
    assert destination(names, CHAT, asked) == ToRun(policy)


def test_other_names_are_the_upstreams_on_its_routes():
    for route in (CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings"):
        assert destination(BESIDE, route, "openai/gpt-5:x") == ToUpstream("openai/gpt-5:x")
    for asked, route in (
        ("other", "/inference/v1/generate"),
        ("other", "/tokenize"),
        ("x" * 300, CHAT),
        ("new\nline", CHAT),
        ("\x1b[31m", CHAT),
    ):
        with pytest.raises(FrontError) as error:
            destination(BESIDE, route, asked)
        assert error.value.status == 404


def test_without_an_upstream_nobody_has_other_names():
    with pytest.raises(FrontError, match="no model 'other'; there are 'small', 'solver', 'critic'") as error:
        destination(ALONE, CHAT, "other")
    assert (error.value.status, error.value.code, error.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("asked", [1, True, ["small"], {"name": "small"}])
def test_what_is_no_name_is_told_so(asked):
    with pytest.raises(FrontError) as error:
        destination(BESIDE, CHAT, asked)
    assert (error.value.status, error.value.param) == (400, "model")
