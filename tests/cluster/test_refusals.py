"""Why a job does not go into a group, in numbers; which of several places a policy takes; and what fits exactly."""

import msgspec
import pytest

from policies.placement import PLACEMENTS, PlacementRules, scrambled
from tests.cluster.conftest import View, group, job, placed, view

S = 1_000_000_000


def refused(policy: str, pool: View, **more: object) -> list[str]:
    newcomer = job("b", 100 * S, 50 * S, **{"slo": 2.0, **more})
    return [str(refusal) for refusal in PLACEMENTS[policy].refusals(newcomer, pool)]


def beside(slo: float = 2.0, **more: object) -> View:
    return view(group("g", 1, (job("a", 100 * S, 100 * S, slo=slo, **more), ("n1",))))


@pytest.mark.parametrize(
    ("policy", "pool", "more", "words"),
    [
        ("ours", beside(train_bytes=3), {"train_bytes": 3}, "host memory of a training node, bytes: 6; allowed: 5"),
        ("ours", beside(), {"slo": 1.3}, "its cycle is longer than the job bears, s: 200; allowed: 195"),
        ("ours", beside(slo=1.0), {"train_nodes": 3}, "the job's own step is longer than a member bears, s: 250"),
        (
            "ours",
            view(group("g", 1, (job("a", 10 * S, 190 * S, slo=1.0), ("n1",)))),
            {},
            "training in a cycle, s: 240; allowed: 200",
        ),
        ("solo", beside(slo=9.0), {}, "jobs share nothing, members: 2; allowed: 1"),
        ("gavel", beside(slo=9.0, rollout_bytes=3), {"slo": 9.0}, "emptiest rollout node, bytes: 4; allowed: 3"),
        (
            "ours",
            view(group("g", 1, (job("a", 120 * S, 80 * S, slo=1.0), ("n1",))))._replace(free_rollout=0),
            {"slo": 1.5},
            "rollout nodes, with the free ones: 1; allowed: 0",
        ),
    ],
)
def test_the_first_thing_in_the_way_is_told(policy: str, pool: View, more: dict[str, object], words: str) -> None:
    told = refused(policy, pool, **more)
    assert len(told) == 1
    assert words in told[0]
    assert told[0].startswith("g: ")


def test_a_group_that_takes_the_job_refuses_nothing() -> None:
    assert refused("ours", beside(slo=2.0)) == []


def test_what_fits_to_the_byte_and_the_nanosecond_is_taken() -> None:
    a = job("a", 100, 100, slo=1.0, rollout_bytes=2, train_bytes=4)
    pool = view(group("g", 1, (a, ("n1",))), requests=(a,))
    newcomer = job("b", 100, 100, slo=1.0)
    choice = placed("ours", newcomer, pool)
    assert (choice.how, choice.cycle_ns) == ("packed", 200)
    choice = placed("ours", msgspec.structs.replace(newcomer, slo=1.01), pool)
    assert choice.how == "packed"
    more = placed("ours", msgspec.structs.replace(newcomer, train_bytes=2), pool)
    assert more.how == "new"


@pytest.mark.parametrize(("policy", "how"), [("naive", "new"), ("gavel", "new"), ("weave", "scaled")])
def test_who_grows_where_only_memory_is_short(policy: str, how: str) -> None:
    choice = placed(policy, job("b", 100 * S, 10 * S, slo=9.0), beside(slo=9.0, rollout_bytes=3))
    assert choice.how == how


def test_the_last_free_node_will_do() -> None:
    a = job("a", 100, 20, slo=1.0)
    pool = view(group("g", 1, (a, ("n1",))), requests=(a,))._replace(free_rollout=1)
    choice = placed("ours", job("b", 90, 20, slo=1.5), pool)
    assert (choice.how, choice.new_rollout) == ("scaled", 1)


def test_the_first_of_equals_as_printed() -> None:
    groups = [group(f"g{i}", 1, (job(f"a{i}", 100, 20, slo=1.0), (f"n{i}",))) for i in range(3)]
    choice = placed("weave", job("b", 90, 20, slo=1.5), view(*groups))
    assert (choice.group, choice.how) == ("g0", "scaled")


def test_ours_takes_the_least_slack_among_those_that_live_equally_long() -> None:
    loose, tight = job("loose", 100, 20, slo=4.0, steps=900), job("tight", 100, 20, slo=2.0, steps=900)
    pool = view(group("g1", 1, (loose, ("n1",))), group("g2", 1, (tight, ("n2",))), requests=(loose, tight))
    choice = placed("ours", job("b", 30, 20, slo=4.0), pool)
    assert choice.group == "g2"


def test_ours_takes_the_fullest_node_and_weave_the_first() -> None:
    empty, full = job("e", 10, 10, slo=9.0), job("f", 60, 10, slo=9.0)
    pool = view(group("g", 1, (empty, ("n1",)), (full, ("n2",))), requests=(empty, full))
    for policy, node in (("ours", "n2"), ("ours_without_moves", "n2")):
        choice = placed(policy, job("b", 20, 10, slo=9.0), pool)
        assert choice.rollout == (node,)
    choice = PlacementRules().place(job("b", 20, 10, slo=9.0), pool)
    assert choice is not None
    assert choice.rollout == ("n1",)
    # Training is what the cycle lasts for, wherever b rolls out.
    empty, full = job("e", 10, 50, slo=9.0), job("f", 30, 50, slo=9.0)
    pool = view(group("g", 1, (empty, ("n1",)), (full, ("n2",))), requests=(empty, full))
    for policy in ("ours", "ours_without_moves"):
        choice = placed(policy, job("b", 20, 10, slo=9.0), pool)
        assert (choice.rollout, choice.cycle_ns) == (("n2",), 110)


def test_who_wants_several_nodes_gets_the_idlest() -> None:
    members = [(job(f"m{i}", ns, 10, slo=20.0), (f"n{i}",)) for i, ns in enumerate((60, 10, 30))]
    pool = view(group("g", 1, *members), requests=tuple(member for member, _ in members))
    choice = placed("ours", job("b", 20, 10, slo=20.0, rollout_nodes=2), pool)
    assert choice.rollout == ("n1", "n2")


def test_who_wants_several_nodes_gets_those_with_memory_to_the_byte_and_new_ones_for_the_rest() -> None:
    held = job("a", 10, 10, slo=20.0, rollout_bytes=2), job("b", 20, 10, slo=20.0, rollout_bytes=1)
    pool = view(group("g", 1, (held[0], ("n1",)), (held[1], ("n2",))), requests=held)
    for more, free, how in (
        ({"rollout_bytes": 1}, 0, (("n1", "n2"), 0, 0)),
        ({"rollout_bytes": 2}, 1, (("n2",), 1, 10)),
        ({"rollout_bytes": 3}, 2, ((), 2, 20)),
        ({"rollout_bytes": 2, "rollout_nodes": 3}, 2, (("n2",), 2, 20)),
    ):
        newcomer = job("c", 10, 10, slo=20.0, **{"rollout_nodes": 2, **more})
        choice = placed("ours", newcomer, pool._replace(free_rollout=free, free_train=0))
        assert (choice.rollout, choice.new_rollout, choice.marginal_nano_usd_per_hour) == how
        if free:
            fewer = pool._replace(free_rollout=free - 1, free_train=0)
            assert PLACEMENTS["ours"].place(newcomer, fewer) is None


def test_the_idlest_nodes_of_the_idlest_group() -> None:
    busy, idle = job("busy", 90, 90, slo=2.0), job("idle", 100, 10, slo=2.0)
    other = job("other", 40, 10, slo=2.0)
    pool = view(group("g1", 1, (busy, ("n1",))), group("g2", 1, (idle, ("n2",)), (other, ("n3",))))
    choice = placed("most_idle", job("b", 20, 10), pool)
    assert (choice.group, choice.how) == ("g2", "scaled")
    choice = placed("most_idle", job("b", 20, 10), pool._replace(free_rollout=0))
    assert (choice.group, choice.rollout) == ("g2", ("n3",))


def test_all_of_a_groups_training_nodes_count_as_busy_while_it_trains() -> None:
    busy, half = job("busy", 10, 90, train_nodes=2), job("half", 50, 50)
    pool = view(group("g1", 2, (busy, ("n1",))), group("g2", 1, (half, ("n2",))))
    choice = placed("most_idle", job("b", 20, 10), pool)
    assert choice.group == "g2"


def test_draws_are_those_of_splitmix64() -> None:
    # The first numbers of the published generator, from these states.
    assert scrambled(0) == 0xE220A8397B1DCDAF
    assert scrambled(1234567) == 6457827717110365317


def test_draws_reach_every_group_and_a_new_one() -> None:
    groups = [group(f"g{i}", 1, (job(f"a{i}", 100, 20), (f"n{i}",))) for i in range(3)]
    reached = [PLACEMENTS["random"].place(job("b", 90, 20), view(*groups)._replace(arrivals=i)) for i in range(64)]
    kinds = [(choice.group, choice.how) for choice in reached if choice is not None]
    assert {where for where, _ in kinds} == {"g0", "g1", "g2", None}
    assert {how for _, how in kinds} == {"packed", "scaled", "new"}
    # Groups are drawn, not places: each comes about a quarter of the times.
    assert all(8 <= [where for where, _ in kinds].count(name) <= 26 for name in ("g0", "g1", "g2", None))
