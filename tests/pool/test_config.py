"""A pool's configuration: what it says, what it refuses, and that it comes back as it was saved."""

from pathlib import Path

import pytest

from elastic.compose.pool_config import POOL_CONFIG, PoolConfig, load_pool, save_pool
from elastic.config import ConfigError, validate

NODES = {"nodes": 1, "usd_per_gpu_hour": 1.0, "memory_gb": 1}
EXAMPLE = Path(__file__).parents[2] / "examples" / "pool.toml"


def test_the_example_is_a_pool_and_comes_back_from_its_directory(tmp_path: Path) -> None:
    written = tmp_path / "pool.toml"
    written.write_text(EXAMPLE.read_text().replace('directory = "pools"', f'directory = "{tmp_path}/pools"'))
    config = load_pool(written)
    (rollout,), (train,) = config.spec().rollout, config.spec().train
    assert (rollout.name, rollout.nodes, train.nano_usd_per_hour) == ("rollout", 2, 5_280_000_000)
    assert config.wait_limits().profile_ns == 300_000_000_000
    path = save_pool(config)
    assert path == tmp_path / "pools" / "lab"
    assert path.stat().st_mode & 0o777 == 0o700
    assert load_pool(path / POOL_CONFIG) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("[pool.train]\nnodes = 1", "[pool.trainers]\nnodes = 1"),
            ("pool.train: required but missing", "pool.trainers: unknown key"),
        ),
        (
            ("[pool.train]\nnodes = 1", "[pool.train]\nnodes = 0"),
            ("pool.train.nodes", "greater than or equal to 1", "found 0"),
        ),
        (("usd_per_gpu_hour = 5.28", "usd_per_gpu_hour = -5.28"), ("pool.train.usd_per_gpu_hour", "found -5.28")),
        (("usd_per_gpu_hour = 5.28\n", ""), ("pool.train.usd_per_gpu_hour: required but missing",)),
        (("usd_per_gpu_hour = 5.28", "usd_per_gpu_hour = inf"), ("pool.train.usd_per_gpu_hour", "found inf")),
        (("memory_gb = 8", "memory_gb = -1"), ("pool.rollout.memory_gb", "found -1")),
        (("memory_gb = 8", "memory_gb = 1e12"), ("pool.rollout.memory_gb", "found 1000000000000.0")),
        (("[pool.train]", "[pool.train]\ngpus = 100000000000"), ("pool.train.gpus", "found 100000000000")),
        (("[pool.train]", '[pool.train]\nsite = "\\u001b[2J"'), ("pool.train.site", "should match pattern")),
        (('policy = "ours"', 'policy = "best"'), ("pool.policy: found 'best'; allowed: 'gavel', 'most_idle'",)),
        (('name = "lab"', 'name = "a/b"'), ("pool.name", "found 'a/b'")),
        (("profile_s = 300", "profile_s = 0"), ("limits.profile_s", "greater than 0", "found 0")),
        (("[limits]", "[limit]"), ("limit: unknown key; allowed: charging, drift, limits, ",)),
        (
            ("[pool.rollout]\n", '[pool.rollout]\nkind = "ray"\n'),
            ("pool.rollout: kind 'ray': found no table `ray`; allowed: one with kind 'ray' alone",),
        ),
        (
            ("[pool.train]\n", '[pool.train]\nray = { address = "ray://a:1" }\n'),
            ("pool.train: kind 'local': found a table `ray`; allowed: one with kind 'ray' alone",),
        ),
        (
            ("[pool.rollout]\n", '[pool.rollout]\nray = { address = "10.0.0.1" }\n'),
            ("pool.rollout.ray.address", "found '10.0.0.1'"),
        ),
        (("[pool.train]", "[[pool.train]]\nnodez = 1"), ("pool.train.0.nodez: unknown key", "near: nodes")),
        (
            ("[pool.train]", "[pool.train]\nname = 'rollout'"),
            ("2 kinds of nodes are called 'rollout'; allowed: a name",),
        ),
        (("[pool.rollout]", "rollout = []\n[pool.other]"), ("pool.rollout", "at least 1 item")),
    ],
)
def test_what_is_no_pool(tmp_path: Path, change: tuple[str, str], words: tuple[str, ...]) -> None:
    text = EXAMPLE.read_text()
    assert change[0] in text
    path = tmp_path / "pool.toml"
    path.write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError) as found:
        load_pool(path)
    for word in words:
        assert word in str(found.value)
    assert str(found.value).startswith(f"{path}: ")


FAR = """
[[pool.rollout]]
name = "far"
site = "b"
kind = "joined"
nodes = 3
usd_per_gpu_hour = 1
memory_gb = 4
[pool.train]"""


def test_several_kinds_have_names_sites_and_prices_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(EXAMPLE.read_text().replace("[pool.rollout]", "[[pool.rollout]]").replace("[pool.train]", FAR))
    config = load_pool(path)
    here, far = config.spec().rollout
    assert ((here.name, here.nodes), (far.name, far.nodes, far.site)) == (("rollout", 2), ("far", 3, "b"))
    assert [(name, rules.kind.memory_bytes) for name, rules in config.joins.items()] == [("far", 4_000_000_000)]
    assert validate(PoolConfig, config.model_dump(mode="json"), "again") == config


def test_a_pool_that_cannot_be_kept_anywhere() -> None:
    config = load_pool(EXAMPLE)
    nowhere = config.pool.model_copy(update={"directory": Path("/proc/nosuch")})
    with pytest.raises(ConfigError, match=r"pool\.directory: /proc/nosuch/lab cannot be made"):
        save_pool(config.model_copy(update={"pool": nowhere}))


def test_kinds_of_one_pool_are_of_one_ray_cluster() -> None:
    def kind(name: str, address: str, **more: object) -> dict[str, object]:
        return {**NODES, "name": name, "kind": "ray", "ray": {"address": address, **more}}

    def pool(second: str, **more: object) -> PoolConfig:
        section = {"devices": "cpu", "rollout": kind("one", "ray://a:1"), "train": kind("two", second, **more)}
        return validate(PoolConfig, {"pool": section}, "pool.toml")

    assert [*pool("ray://a:1").clusters] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"found ray://a:1, ray://b:1; allowed: one Ray cluster for a pool"):
        pool("ray://b:1")
    with pytest.raises(ConfigError, match=r"ray.runtime_env: found several; allowed: the same for all kinds"):
        pool("ray://a:1", runtime_env={"pip": ["one"]})
    with pytest.raises(ConfigError, match=r"pool.devices: found 'auto'; allowed with kind 'ray', .*: 'cuda', 'rocm'"):
        validate(PoolConfig, {"pool": {"rollout": kind("one", "ray://a:1"), "train": NODES}}, "pool.toml")
