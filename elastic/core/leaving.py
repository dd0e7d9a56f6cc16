"""What a departure policy sees of a worker that is about to leave."""

from elastic.core.fleet import Worker
from elastic.core.profiles import BatchProfile
from elastic.core.run_state import RunState
from elastic.core.types import WorkerId


class Leaving:
    """A worker that leaves in `left_ns`, as a departure policy sees it (`elastic.core.policy.LeavingView`)."""

    __slots__ = ("_run", "_worker", "left_ns")

    def __init__(self, run: RunState, worker: Worker) -> None:
        self._run = run
        self._worker = worker
        assert worker.leaves_ns is not None
        self.left_ns = max(0, worker.leaves_ns - run.now_ns)

    @property
    def id(self) -> WorkerId:
        return self._worker.id

    @property
    def receivers(self) -> int:
        return self._run.fleet.helping_workers

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode speed of one turn in a batch of the present size."""
        return self._profile.turn_tokens_per_s(max(1, self._worker.outstanding))

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._profile.prefill_tokens_per_s

    @property
    def _profile(self) -> BatchProfile:
        return self._run.profiles.get(self._worker.kind) or BatchProfile()
