"""Where a worker looks for its weights, by what it is told and what its host is said to have."""

from pathlib import Path

import msgspec
import pytest

from elastic.pool.messages import SITE_FILE_VARIABLE, SiteRelay
from elastic.weights.source import RelaySource
from elastic.worker.weights import source_of
from tests.worker.conftest import KEY, ordered, welcome_to


@pytest.mark.parametrize("site", [{}, {"ELASTIC_SITE": "/near", "ELASTIC_SITE_TOKEN": "of the site"}])
def test_a_source_is_what_the_welcome_the_order_and_the_host_say(monkeypatch: pytest.MonkeyPatch, site: dict[str, str]):
    for variable in ("ELASTIC_SITE", "ELASTIC_SITE_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in site.items():
        monkeypatch.setenv(variable, value)
    assert source_of(welcome_to("relay", "of the run", "a run"), ordered(7)) == RelaySource(
        run="a run",
        version=7,
        relay="relay",
        relay_token="of the run",
        publisher=KEY.public,
        cache=site.get("ELASTIC_SITE", ""),
        cache_token=site.get("ELASTIC_SITE_TOKEN", ""),
    )


def test_a_node_agent_s_file_names_the_relay_of_the_site_from_pull_to_pull(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("ELASTIC_SITE", "ELASTIC_SITE_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "relay.json"
    monkeypatch.setenv(SITE_FILE_VARIABLE, str(file))

    def found() -> tuple[str, str, str]:
        source = source_of(welcome_to("relay", "of the run", "a run"), ordered(7))
        return source.cache, source.cache_token, source.cache_anchor

    assert found() == ("", "", "")
    file.write_bytes(msgspec.json.encode(SiteRelay("https://near:1", "its token", "its anchor")))
    assert found() == ("https://near:1", "its token", "its anchor")
    file.write_bytes(b"half a fi")
    assert found() == ("", "", "")
    monkeypatch.setenv("ELASTIC_SITE", "/near")
    assert found() == ("/near", "", "")
