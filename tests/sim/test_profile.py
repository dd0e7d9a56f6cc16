"""Profiles: every number has a source or bounds, and what is wrong with a file is said by name."""

import re
from pathlib import Path

import pytest

from elastic.simulation.performance import profile
from elastic.simulation.performance.profile import (
    DATA,
    EFFICIENCY,
    HARDWARE,
    MODELS,
    Number,
    ProfileError,
    load_profile,
    profile_names,
    with_numbers,
    write_profile,
)

RATES = ("prefill_tokens_per_s", "kv_tokens", "link_bytes_per_s", "relay_bytes_per_s", "train_tokens_per_s")
LOCAL = (DATA / "profile-local.toml").read_text()


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_can_be_loaded(name: str) -> None:
    loaded = load_profile(name)
    assert loaded.prefill_tokens_per_s > 0
    assert loaded.kv_tokens > 0
    assert all(step_s > 0 for step_s in loaded.decode_step_s.values())


def test_more_devices_are_faster_and_hold_more() -> None:
    one, two = load_profile("H100/Qwen3-8B"), load_profile("H100/Qwen3-8B:tp2")
    assert two.prefill_tokens_per_s == pytest.approx(2 * one.prefill_tokens_per_s)
    assert two.kv_tokens > 2 * one.kv_tokens
    assert two.train_tokens_per_s == pytest.approx(one.train_tokens_per_s), "of each GPU"
    assert load_profile("H100/Qwen3-8B", gpus=2).prefill_tokens_per_s == two.prefill_tokens_per_s
    assert load_profile("H100/Qwen3-8B:tp2", gpus=4) == two, "the name goes first"


def test_what_is_known_better() -> None:
    assert with_numbers(load_profile("local"), {"boot_s": 1.0}).boot_s == 1.0
    for numbers in ({"bot_s": 1.0}, {"boot_s": -1.0}, {"boot_s": float("nan")}, {"link_bytes_per_s": 0.0}, {"name": 1}):
        (key,) = numbers
        with pytest.raises(ProfileError, match=f"^{key}: "):
            with_numbers(load_profile("local"), numbers)


def test_a_model_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HARDWARE, MODELS, EFFICIENCY):
        (tmp_path / name).write_text((DATA / name).read_text().replace("value = 80,", "value = 40,"))
    monkeypatch.setattr(profile, "DATA", tmp_path)
    with pytest.raises(ProfileError, match=r"65\.6 GB of weights do not fit .*H100/Qwen3-32B:tp2"):
        load_profile("H100/Qwen3-32B")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nothing", "neither a file nor one of local"),
        ("H7/Qwen3-8B", "no device 'H7'"),
        ("H100/GPT", "no model 'GPT'"),
        ("H100/Qwen3-8B:tpx", "DEVICE/MODEL"),
        ("H100/Qwen3-8B:tp0", "N from 1 on"),
        ("H100/Qwen3-8B:pp2", "N from 1 on"),
        ("/tmp", "neither a file nor one of local"),
        ("./H100/Qwen3-8B", "neither a file nor one of local"),
        ("machines/absent.toml", "neither a file nor one of local"),
    ],
)
def test_unknown_names(name: str, found: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(found)):
        load_profile(name)


@pytest.mark.parametrize(
    ("line", "instead", "found"),
    [
        ("boot_s", "", "boot_s: missing"),
        ("boot_s", 'boot_s = { value = "fast", source = "x" }', "boot_s: Expected `float`"),
        ("boot_s", "boot_s = { value = 4.0 }", "either a source or an estimate"),
        ("boot_s", 'boot_s = { value = 4.0, estimate = "so" }', "needs low and high"),
        ("boot_s", 'boot_s = { value = 4.0, estimate = "so", low = 5.0, high = 6.0 }', "not between"),
        ("boot_s", 'boot_s = { value = -1.0, source = "x" }', "found -1.0"),
        ("boot_s", 'boot_s = { value = nan, source = "x" }', "finite"),
        ("boot_s", 'bot_s = { value = 1.0, source = "x" }', "bot_s: unknown key"),
        ("boot_s", "boot_s = 4.0", "boot_s"),
        *((key, f'{key} = {{ value = 0, source = "x" }}', f"{key}: found 0; allowed: a positive") for key in RATES),
        ("16", "", ""),
        ("1 ", 'x = { value = 1.0, source = "x" }', "batch sizes from 1 on"),
    ],
)
def test_bad_files(tmp_path: Path, line: str, instead: str, found: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("\n".join(instead if text.startswith(line) else text for text in LOCAL.splitlines()))
    if found:
        with pytest.raises(ProfileError, match=re.escape(found)):
            load_profile(str(path))
    else:
        load_profile(str(path))


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    local = load_profile("local")
    keys = [key for key in local.__struct_fields__ if key not in ("name", "decode_step_s")]
    write_profile(
        path, {key: Number(getattr(local, key), source='a "test"') for key in keys}, {1: Number(0.5, source="t")}
    )
    again = load_profile(str(path))
    assert again.boot_s == local.boot_s
    assert again.decode_step_s == {1: 0.5}
