"""Keys of agents and drivers: they name what they are of, and nobody makes one that the run has not made."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.ids import trajectory_id
from elastic.protocol.front_messages import AgentCaller
from elastic.protocol.run_secrets import ROOT_BYTES, RunSecrets

ROOTS = st.binary(min_size=ROOT_BYTES, max_size=ROOT_BYTES)
NUMBERS = st.integers(0, 10**6)


@given(ROOTS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_a_key_names_its_trajectory(root: bytes, step: int, group: int, member: int, restart: int) -> None:
    secrets, trajectory = RunSecrets(root), trajectory_id(step, group, member)
    caller = secrets.caller_of(secrets.agent_key(trajectory, restart))
    assert caller == AgentCaller(trajectory=trajectory, restart=restart)
    assert secrets.caller_of(secrets.driver_key("main")) == AgentCaller(driver="main")


@given(ROOTS, ROOTS, NUMBERS)
def test_another_runs_key_is_none_of_this_ones(root: bytes, other: bytes, restart: int) -> None:
    key = RunSecrets(other).agent_key("1/2/3", restart)
    assert (RunSecrets(root).caller_of(key) is not None) is (root == other)


@given(ROOTS, st.text(), st.integers(0, 60))
def test_what_is_made_up_is_no_key(root: bytes, text: str, at: int) -> None:
    secrets = RunSecrets(root)
    key = secrets.agent_key("1/2/3", 0)
    for made in (text, f"agent.1-2-4.0.{key.rpartition('.')[2]}", key[:at] + text + key[at + 1 :]):
        if made != key:
            assert secrets.caller_of(made) is None
