"""Serving's requests and rollouts in one vLLM: which rollouts have to go, and which may not begin. Pure.

- Rollouts hold at most a share of the KV blocks, however much is free.
- A serving request that waits gets blocks and a place in the batch from rollouts, the newest first.
- Where serving has nothing to do and no rollout runs, one rollout may run, however large it is.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SharingRequest(NamedTuple):
    """`blocks` are those that a running request holds, or that a waiting one needs to begin."""

    name: str
    rollout: bool
    blocks: int


class SharingDecision(NamedTuple):
    """Before an iteration: running rollouts that are preempted, and rollouts that may not begin in it."""

    preempted: list[str]
    withheld: list[str]


def decide(
    running: Sequence[SharingRequest],
    waiting: Sequence[SharingRequest],
    *,
    free_blocks: int,
    rollout_blocks: int,
    places: int,
) -> SharingDecision:
    """`running` in the order in which they began, `waiting` in that in which they would begin.

    `rollout_blocks` is the most that rollouts may hold, `places` how many requests run at once.
    """
    rollouts = [request for request in running if request.rollout]
    served = [request for request in waiting if not request.rollout]
    held = sum(request.blocks for request in rollouts)
    lacking_blocks = sum(request.blocks for request in served) - free_blocks
    lacking_places = len(running) + len(served) - places
    preempted: list[str] = []
    for request in reversed(rollouts):
        too_many = held > rollout_blocks and request is not rollouts[0]
        if not (too_many or lacking_blocks > 0 or lacking_places > 0):
            break
        preempted.append(request.name)
        held -= request.blocks
        lacking_blocks -= request.blocks
        lacking_places -= 1
    withheld = list(preempted)
    for request in waiting:
        if not request.rollout:
            continue
        fits = held + request.blocks <= rollout_blocks or not (running or held)
        if fits and not served and not preempted:
            held += request.blocks
        else:
            withheld.append(request.name)
    return SharingDecision(preempted, withheld)
