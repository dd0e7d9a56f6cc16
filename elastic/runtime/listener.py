"""What workers say, as events of the run that they work for."""

from collections.abc import Callable
from typing import Any

from elastic.core import events as e
from elastic.core.ids import lease_of, provider_of
from elastic.core.types import NS_PER_S, Nanoseconds, WorkerId
from elastic.protocol import wire
from elastic.runtime.agents import Chats
from elastic.runtime.recorder import JournalRecorder
from elastic.runtime.run import Run
from elastic.runtime.trainer import GatewayTrainer


class Listener:
    """A `elastic.runtime.gateway.WorkerListener`: frames become events, with what the recorder wants of them besides.

    `trust` hears the public key of each trainer that joins, `stepped` of each version that it has stepped to.
    """

    trainer: GatewayTrainer
    chats: Chats | None = None
    """The chats: workers' messages about chats go to them, and the others to the run."""

    def __init__(
        self,
        run: Run,
        recorder: JournalRecorder,
        now_ns: Callable[[], Nanoseconds],
        trust: Callable[[str], None],
        stepped: Callable[[int], None],
    ) -> None:
        self._run = run
        self._recorder = recorder
        self._now_ns = now_ns
        self._trust = trust
        self._stepped = stepped
        self._hear: dict[type[Any], Callable[[WorkerId, int, Any], None]] = {
            wire.Tokens: self._on_tokens,
            wire.Heartbeat: self._on_heartbeat,
            wire.WeightsReport: self._on_weights,
            wire.Slept: lambda w, n, _: run.feed(e.WorkerSlept(worker=w, epoch=n)),
            wire.Awoke: lambda w, n, _: run.feed(e.WorkerAwoke(worker=w, epoch=n)),
            wire.Notice: self._on_notice,
            wire.Goodbye: self._on_goodbye,
            wire.Trained: self._on_trained,
            wire.Stepped: self._on_stepped,
            wire.PublishedFrame: lambda w, n, m: recorder.published(m.version, m.changed, m.metrics),
            wire.UpdateRefused: self._on_refused,
            wire.TrainerFailedFrame: lambda w, n, m: run.feed(e.TrainerFailed(worker=w, epoch=n, error=m.error)),
        }

    def on_ready(self, worker: WorkerId, epoch: int, ready: wire.Ready) -> None:
        def joined(version: int | None) -> None:
            proof = tuple(ready.proof) if version == ready.weights_version else ()
            self._run.feed(
                e.WorkerJoined(
                    worker=worker, epoch=epoch, capabilities=ready.capabilities, weights_version=version, proof=proof
                )
            )

        if provider_of(worker) == self._run.scheduler.plan.trainer_provider and ready.weights_version is not None:
            self._trust(ready.publisher)
            self.trainer.join(worker, epoch, ready, joined)
        else:
            joined(ready.weights_version)

    def on_message(self, worker: WorkerId, epoch: int, message: wire.FromWorker) -> None:
        hear = self._hear.get(type(message))
        if hear is not None and not self.trainer.answered(worker, epoch, message):
            hear(worker, epoch, message)

    def on_disconnected(self, worker: WorkerId, epoch: int, goodbye: bool) -> None:
        self._run.feed(e.WorkerDisconnected(worker=worker, epoch=epoch, goodbye=goodbye))

    def on_barred(self, worker: WorkerId, epoch: int, cause: str) -> None:
        self._run.feed(e.WorkerBarred(worker=worker, epoch=epoch, cause=cause))

    def _on_tokens(self, worker: WorkerId, epoch: int, tokens: wire.Tokens) -> None:
        if self.chats is not None and (rest := self.chats.own(worker, epoch, tokens)) is not tokens:
            if rest is None:
                return
            tokens = rest
        self._run.feed(e.TokensReceived(worker=worker, epoch=epoch, chunks=tokens.chunks), tokens)

    def _on_heartbeat(self, worker: WorkerId, epoch: int, beat: wire.Heartbeat) -> None:
        pending, executing = beat.pending, beat.executing
        if self.chats is not None:
            pending, executing = self.chats.beside(worker, pending, executing)
        self._run.feed(
            e.WorkerReported(
                worker=worker,
                epoch=epoch,
                capacity_turns=beat.capacity_turns,
                pending=pending,
                executing=executing,
                progress=beat.progress,
                accounts_ns=beat.accounts_ns,
                decoded_tokens=beat.decoded_tokens,
                kv_used_share=beat.kv_used_share,
                prefix_hit_tokens=beat.prefix_hit_tokens,
                prompt_tokens=beat.prompt_tokens,
                loading=beat.loading,
                load_progress=beat.load_progress,
                paced_iterations=beat.paced_iterations,
                late_iterations=min(beat.late_iterations, beat.paced_iterations),
            )
        )

    def _on_notice(self, worker: WorkerId, _: int, notice: wire.Notice) -> None:
        """Take a notice for the worker's own lease. A worker can end no other lease."""
        left_s = notice.left_s
        deadline_ns = None if left_s is None else self._now_ns() + round(left_s * NS_PER_S)
        self._run.feed(e.LeaseNotice(lease=lease_of(worker), deadline_ns=deadline_ns, reason=notice.reason))

    def _on_goodbye(self, worker: WorkerId, epoch: int, goodbye: wire.Goodbye) -> None:
        self._run.feed(
            e.WorkerReported(
                worker=worker,
                epoch=epoch,
                capacity_turns=0,
                pending=0,
                executing=0,
                progress=0,
                accounts_ns=goodbye.accounts_ns,
                decoded_tokens=goodbye.decoded_tokens,
            )
        )

    def _on_weights(self, worker: WorkerId, epoch: int, report: wire.WeightsReport) -> None:
        if report.error:
            reason, version = report.error, report.version
            self._run.feed(e.WeightsFailed(worker=worker, epoch=epoch, version=version, reason=reason), report)
        else:
            proof = tuple(report.proof)
            self._run.feed(e.WeightsApplied(worker=worker, epoch=epoch, version=report.version, proof=proof), report)

    def _on_trained(self, worker: WorkerId, epoch: int, trained: wire.Trained) -> None:
        checks = tuple(trained.checks)
        self._run.feed(e.GroupTrained(worker=worker, epoch=epoch, group=trained.group, checks=checks))

    def _on_stepped(self, worker: WorkerId, epoch: int, stepped: wire.Stepped) -> None:
        event = e.WeightsPublished(
            worker=worker,
            epoch=epoch,
            version=stepped.version,
            checks=tuple(stepped.checks),
            proof=tuple(stepped.proof),
            unusable=len(stepped.unusable),
            reason=next(iter(stepped.unusable.values()), ""),
        )
        self._run.feed(event, stepped.metrics)
        for group, reason in stepped.unusable.items():
            self._recorder.unusable(group, reason)
        self._stepped(stepped.version)

    def _on_refused(self, worker: WorkerId, epoch: int, refused: wire.UpdateRefused) -> None:
        version, reason, again = refused.version, refused.reason, refused.again
        self._run.feed(e.VersionRefused(worker=worker, epoch=epoch, version=version, reason=reason, again=again))
