"""Trajectories for trainers, with their values by token."""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

from elastic.protocol.sampled import Sampled, ids_of, logprobs_of, pack_ids, pack_logprobs
from elastic.protocol.wire import TrajectoryData


@dataclass(slots=True)
class PlainTrajectory:
    """A trajectory as lists. `trained` is 1 where the policy sampled the token; elsewhere the other values do not
    count."""

    trajectory: str
    token_ids: list[int] = field(default_factory=list[int])
    trained: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    reward: float = 0.0
    origins: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def packed(self) -> TrajectoryData:
        sampled = Sampled(origins=self.origins, reward=self.reward)
        places = [place for place, mark in enumerate(self.trained) if mark]
        for _, run in groupby(enumerate(places), key=lambda numbered: numbered[1] - numbered[0]):
            span = [place for _, place in run]
            sampled.spans.append((span[0], len(span)))
        sampled.logprobs += pack_logprobs(self.logprobs[place] for place in places)
        versions = groupby(self.versions[place] for place in places)
        sampled.versions += [(version, len(list(run))) for version, run in versions]
        return TrajectoryData(self.trajectory, bytearray(pack_ids(self.token_ids)), sampled)

    @classmethod
    def of(cls, data: TrajectoryData) -> Self:
        token_ids, sampled = ids_of(data.token_ids), data.sampled
        trained = sampled.trained(len(token_ids)).astype(int).tolist()
        logprobs, versions = iter(logprobs_of(sampled.logprobs)), iter(sampled.token_versions().tolist())
        return cls(
            data.trajectory,
            token_ids,
            trained,
            [next(logprobs) if mark else 0.0 for mark in trained],
            [next(versions) if mark else 0 for mark in trained],
            sampled.reward,
            sampled.origins,
        )
