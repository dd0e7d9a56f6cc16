"""The queue against a search through all that is queued."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.turn_queue import Needs, TurnQueue

NEEDS: tuple[Needs, ...] = ((0, ()), (1, ()), (0, ("w",)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=80))
def test_each_lines_head_is_its_oldest_and_a_new_one_is_told(actions: list[tuple[int, int]]) -> None:
    queue, queued = TurnQueue(), dict[int, Needs]()
    for action, order in actions:
        before = {*queue.heads}
        queue.changed = False
        if action < len(NEEDS):
            queue.add(f"t{order}", order, NEEDS[action])
            queued[order] = NEEDS[action]
        elif order in queued:
            queue.remove(f"t{order}", order)
            del queued[order]
        heads = sorted(min(o for o, needs in queued.items() if needs == line) for line in {*queued.values()})
        assert [turn for _, _, turn in queue.heads] == [f"t{order}" for order in heads]
        assert queue.head() == (f"t{heads[0]}" if heads else None)
        assert bool(queue) is bool(queued)
        assert queue.changed or {*queue.heads} <= before
