"""Whatever configuration is submitted: if it is accepted, it names nothing outside of its project's storage."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.config import Config
from elastic.protocol.api import Submission
from elastic.server import ids
from elastic.server.intake import submissions
from elastic.server.problems import ApiProblem
from elastic.system.installed import installed
from tests.seeds import examples
from tests.server.conftest import CONFIG, Site

Place = tuple[str, ...]
OUR_UPLOAD, THEIR_UPLOAD = ids.new_id(ids.UPLOAD), ids.new_id(ids.UPLOAD)
FREE_TEXT = {
    ("front", "model_name"),
    ("run", "name"),
    *(("providers", "ec2", *place) for place in (("install", "[]"), ("queue",), ("secret_prefix",), ("profile",))),
    *(("providers", "ec2", *place) for place in (("instance_types", "[]"), ("zones", "[]"), ("subnets", "*"))),
    *(("providers", "ec2", *place) for place in (("security_groups", "[]"), ("instance_profile",))),
    *(("providers", "modal", name) for name in ("app", "environment", "gpu", "region", "volume", "volume_path")),
    ("providers", "ray", "namespace"),
    ("providers", "serving-replay", "executor", "model_name"),
}
"""What is only ever shown, or a vendor's to know: no file, host or program of the server's."""


def places(schema: dict[str, Any], whole: dict[str, Any], at: Place = (), depth: int = 0) -> Iterator[Place]:
    """Where a configuration of this schema may have text: "*" is any key, "[]" an element."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if depth > 8:
        return
    if schema.get("type") == "string" or schema == {}:
        yield at
    for one in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())):
        yield from places(one, whole, at, depth + 1)
    for name, inner in schema.get("properties", {}).items():
        yield from places(inner, whole, (*at, name), depth + 1)
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from places(inner, whole, (*at, "*"), depth + 1)
    for inner in (schema.get("items"), *schema.get("prefixItems", ())):
        if isinstance(inner, dict):
            yield from places(inner, whole, (*at, "[]"), depth + 1)


def all_places() -> list[Place]:
    schema = Config.model_json_schema()
    found = set(places(schema, schema))
    for kind, point in installed("elastic.providers").items():
        try:
            inner = point.load().Settings.model_json_schema()
        except ImportError:
            continue
        found |= {("providers", kind, *place) for place in places(inner, inner)}
    return sorted(found)


def with_text(raw: dict[str, Any], place: Place, text: str) -> None:
    table: Any = raw
    for part, after in zip(place, (*place[1:], None), strict=True):
        key: Any = "x" if part == "*" else part
        if part == "[]":
            key = 0
            if not table:
                table.append(None)
        if after is None:
            table[key] = text
            return
        wanted = list if after == "[]" else dict
        inner = table[key] if isinstance(table, list) else table.get(key)
        if not isinstance(inner, wanted):
            inner = table[key] = wanted()
        table = inner


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (str(key), *texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


@pytest.fixture(scope="module")
def site_with_files(shared_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    outside = tmp_path_factory.mktemp("outside")
    for project in ("ours", "theirs"):
        storage = shared_site.settings.storage(shared_site.projects[project])
        storage.mkdir(parents=True, exist_ok=True)
        (storage / "market.csv").write_text("time_s,event,instance_id\n0,add,a\n9,remove,a\n")
    for project, upload in (("ours", OUR_UPLOAD), ("theirs", THEIR_UPLOAD)):
        place = shared_site.settings.uploads(shared_site.projects[project]) / upload
        place.mkdir(parents=True)
        (place / "market.csv").write_text("time_s,event,instance_id\n0,add,a\n9,remove,a\n")
    (outside / "market.csv").write_text("time_s,event,instance_id\n0,add,a\n9,remove,a\n")
    (shared_site.settings.storage(shared_site.projects["ours"]) / "link").symlink_to(outside)
    return shared_site


def foreign(site: Site) -> list[str]:
    """Files, hosts, programs and variables that are nobody's to name."""
    theirs, home = site.projects["theirs"], site.settings.home.resolve()
    return [
        *("/etc/passwd", "/proc/self/environ", "~/.ssh/id_ed25519", "file:///etc/passwd", "C:\\secrets.txt"),
        *(f"{home}/projects/{theirs}/market.csv", f"../{theirs}/market.csv", f"market.csv/../../{theirs}/market.csv"),
        *(f"{home}/elastic.sqlite", "link/market.csv", "link", "pyproject.toml", "..", ".", "./../.."),
        *("ray://10.0.0.1:10001", "https://169.254.169.254/latest", "//host/share", "10.0.0.1:22"),
        *(
            f"upload:{THEIR_UPLOAD}",
            f"upload:{THEIR_UPLOAD}/market.csv",
            f"upload:../{theirs}/{THEIR_UPLOAD}",
            "upload:",
        ),
        *(f"{home}/uploads/{theirs}/{THEIR_UPLOAD}", f"upload:{OUR_UPLOAD}/../../{theirs}/{THEIR_UPLOAD}/market.csv"),
        *("os:system", "os.path:join", "elastic.server.api.auth:Caller", "$HOME/x", "${HF_TOKEN}", "%(HOME)s/x"),
    ]


# Live runs do not look at what is said of simulations.
PLACES = [place for place in all_places() if place[0] != "simulation"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40, 100), deadline=None)
@given(data=st.data())
def test_nothing_foreign_is_ever_accepted(site_with_files: Site, data: st.DataObject) -> None:
    """A property over configurations, each of which is submitted."""
    site = site_with_files
    place = data.draw(st.sampled_from(PLACES))
    text = data.draw(st.sampled_from(foreign(site)) | st.text("./~\\ab:$", min_size=1, max_size=8))
    raw = tomllib.loads(CONFIG)
    said_at = place
    if place[0] == "providers" and len(place) > 2:
        raw["providers"]["spot"] = {"kind": place[1]}
        place = ("providers", "spot", *place[2:])
    if said_at[1:2] == ("ec2",):
        raw["providers"]["spot"]["image"] = "ami-0123456789abcdef0"
    with_text(raw, place, text)
    reached = replace(site.settings, runs_listen="10.0.0.5")
    try:
        new, _ = submissions.check(reached, Submission(config=raw, providers=["spot"]), site.projects["ours"])
    except ApiProblem:
        return
    if said_at in FREE_TEXT or place in submissions.code_in(raw):  # Code is refused where it is not trusted.
        return
    storage = site.settings.storage(site.projects["ours"]).resolve()
    roots = [storage, *(models.resolve() for models in site.settings.models)]
    for said in texts(new.config.model_dump(mode="json")):
        if said != text or any(Path(said).resolve().is_relative_to(root) for root in roots):
            continue
        assert not any(mark in said for mark in "/\\:$~%"), (place, said)
        assert not Path(said).exists() or (storage / said).resolve().is_relative_to(storage), (place, said)


def test_every_part_of_a_configuration_is_tried() -> None:
    tops = {place[0] for place in PLACES}
    assert {"run", "model", "environment", "rewards", "engine", "weights", "providers", "trainer"} <= tops, tops
    assert ("model", "checkpoint") in PLACES
