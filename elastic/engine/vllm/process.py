"""vLLM's process: one loop that obeys, generates an iteration, and says what came of it.

- The loop drives vLLM's engine core itself, without its servers: no port is opened, and nobody but the worker that
  started the process is connected to it. The process ends when that worker does.
- Requests wait here, not in vLLM, while they may not begin: before the first weights, asleep, and while new weights
  wait for running turns.
- A request's cache salt is the version that it begins with, and the key that this was signed with: KV of one version is
  never found by another, nor by the same one that another trainer has come to.
"""

# pyright: reportMissingImports=false

import faulthandler
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json import dumps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from elastic.core.types import Account, FinishReason, WeightMode
from elastic.engine.base import NO_VERSION, GenerateRequest, TokenChunk
from elastic.engine.torch.pacing import NO_LOAD, IterationLoad
from elastic.engine.validation import unsound_logprob
from elastic.engine.vllm import messages as m
from elastic.engine.vllm.extension import adapter
from elastic.engine.vllm.sampling import ARGUMENT
from elastic.weights.source import PullReport

POLL_S = 0.01
"""How often jobs beside the model are asked for while nothing is generated; between iterations they always are."""
REASON_CHARACTERS = 1000
PROOF_KEY = "proof"
"""The name in vLLM of what a version is to answer as it is put in force."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A request on its way. `key` is its name in vLLM, a new one whenever it is given to vLLM again."""

    request: GenerateRequest
    position: int
    generated: list[int] = field(default_factory=list)
    key: str = ""
    core: Any = None
    reported: bool = False
    prefilled_once: bool = False


class Inbox:
    """What the worker says, received on a thread of its own; the process ends with the connection."""

    def __init__(self, line: m.Line) -> None:
        self._line = line
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="messages", daemon=True).start()

    def take(self, timeout_s: float | None) -> Any:
        """The next message, or None where there is none in time; without a time, whenever it comes."""
        try:
            return self._messages.get(timeout=timeout_s) if timeout_s != 0 else self._messages.get_nowait()
        except queue.Empty:
            return None

    def _receive(self) -> None:
        try:
            while True:
                self._messages.put(self._line.receive())
        except (OSError, EOFError):
            # Nobody is there any more, whatever the loop is at.
            os._exit(0)


class VllmProcess:
    """One thread does everything. `elastic.engine.vllm.engine` is the other end."""

    def __init__(self, core: Any, line: m.Line, inbox: Inbox, sleep_level: int) -> None:
        self._core = core
        self._adapts = core.vllm_config.lora_config is not None
        """Versions are adapters to the base."""
        self._line = line
        self._inbox = inbox
        self._sleep_level = sleep_level
        self._turns: dict[str, _Turn] = {}
        self._by_key: dict[str, _Turn] = {}
        self._held: dict[str, _Turn] = {}
        """Turns that vLLM does not have yet, in order."""
        self._orders: list[m.LoadVersion] = []
        self._jobs: dict[int, float] = {}
        """Calls whose work goes on beside the model, with when it began."""
        self._asleep = False
        self._version: int | None = None
        self._signed_by = ""
        """The key with which the version in force was signed; empty for tensors of the trainer itself."""
        self._keys = 0
        self._proof: list[float] | None = None
        self._prefix_hit_tokens = self._prompt_tokens = 0
        self._received_bytes = -1
        self._planned: Any = None
        self._watch_schedule()
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Submit: self._submit,
            m.AbortRequests: lambda message: self._abort(message.request_ids),
            m.Prefetch: lambda message: self._begin(message.call, "prefetch", message.source, message.timeout_s),
            m.Audit: lambda message: self._begin(message.call, "audit"),
            m.LoadVersion: self._order,
            m.SleepNow: lambda message: self._answer(message.call, self._fall_asleep, self._state_bytes),
            m.WakeUp: lambda message: self._answer(message.call, self._awake, self._state_bytes),
            m.ReadBack: lambda message: self._answer(message.call, lambda: self._ranks("read_back", message.path)),
        }

    def run(self) -> NoReturn:
        """Until the worker hangs up."""
        self._core.collective_rpc("elastic_prepare")
        while True:
            self._obey()
            if self._orders and self._may_apply(self._orders[0]):
                self._apply(self._orders.pop(0))
            self._admit()
            if self._core.scheduler.has_requests():
                self._iterate()
            self._poll()

    # Orders

    def _obey(self) -> None:
        """All orders there are; where there is nothing to do, wait for one."""
        busy = self._core.scheduler.has_requests() or (self._orders and self._may_apply(self._orders[0]))
        timeout_s: float | None = 0 if busy else POLL_S if self._jobs else None
        while (message := self._inbox.take(timeout_s)) is not None:
            self._handlers[type(message)](message)
            timeout_s = 0

    def _submit(self, message: m.Submit) -> None:
        for request in message.requests:
            turn = _Turn(request, request.start)
            self._turns[request.request_id] = self._held[request.request_id] = turn

    def _abort(self, request_ids: Sequence[str]) -> None:
        turns = [turn for name in request_ids if (turn := self._turns.get(name)) is not None]
        if not turns:
            return
        self._withdraw(turns)
        for turn in turns:
            self._forget(turn)
        self._say([self._last(turn, FinishReason.ABORTED) for turn in turns])

    def _begin(self, call: int, what: str, *arguments: Any) -> None:
        self._jobs[call] = time.monotonic()
        self._ranks("begin", call, what, *arguments)

    def _poll(self) -> None:
        for call in list(self._jobs):
            polled = self._ranks("poll", call) if call in self._jobs else []
            self._note_received(sum(each.received_bytes for each in polled))
            if not all(each.done for each in polled):
                continue
            del self._jobs[call]
            self._ranks("forget", call)
            error = next((each.error for each in polled if each.error is not None), None)
            results = [each.result for each in polled]
            if error is not None:
                self._line.send(_failure(call, error))
            elif isinstance(results[0], PullReport):
                self._line.send(m.Reply(call, report=PullReport.of_ranks(results)))
            else:
                self._line.send(m.Reply(call, sound=all(results)))

    def _note_received(self, received_bytes: int) -> None:
        if received_bytes != self._received_bytes:
            self._received_bytes = received_bytes
            self._line.send(m.PrefetchProgress(received_bytes))

    def _answer(self, call: int, work: Callable[[], object], state_bytes: Callable[[], int] = lambda: 0) -> None:
        try:
            work()
            reply = m.Reply(call, state_bytes=state_bytes())
        except Exception as error:
            reply = _failure(call, error)
        self._line.send(reply)

    def _state_bytes(self) -> int:
        return sum(self._ranks("state_bytes"))

    def _ranks(self, what: str, *arguments: Any) -> list[Any]:
        """What `elastic.engine.vllm.extension.RankWeights` returns on each rank."""
        return self._core.collective_rpc("elastic_call", args=(what, *arguments))

    # Weights

    def _order(self, order: m.LoadVersion) -> None:
        self._orders.append(order)
        # What vLLM has not begun begins with the new weights.
        self._withdraw([turn for turn in self._by_key.values() if _is_waiting(turn)])

    def _may_apply(self, order: m.LoadVersion) -> bool:
        return order.mode is not WeightMode.FINISH or not self._by_key

    def _apply(self, order: m.LoadVersion) -> None:
        """In place, between two iterations. After a failure half-way nothing is served until the next order."""
        self._line.send(m.Spends(Account.APPLYING))
        if order.mode is not WeightMode.KEEP or self._version is None:
            self._withdraw([*self._by_key.values()])
        try:
            self._put_in_force(order)
            proof = self._prove(order.proof)
        except Exception as error:
            self._line.send(_failure(order.call, error))
        else:
            self._line.send(m.Reply(order.call, proof=proof))

    def _prove(self, text: list[int]) -> list[float]:
        """The log-probabilities of the text's tokens but the first, with the weights in force; before any turn has
        these."""
        if not text:
            return []
        self._proof = None
        self._ask(PROOF_KEY, text, {"max_tokens": 1, "prompt_logprobs": 0}, priority=0)
        while self._proof is None and self._core.scheduler.has_requests():
            self._iterate()
        return self._proof or []

    def _put_in_force(self, order: m.LoadVersion) -> None:
        from elastic.engine.base import WeightsMismatch
        from elastic.weights.errors import VersionSuperseded

        before, self._version = self._version, None
        asleep = self._asleep and self._sleep_level > 0
        if asleep:
            self._core.model_executor.wake_up(["weights"])
        try:
            if order.source is not None:
                self._ranks("put_in_force", order.source)
            else:
                self._ranks("put_file_in_force", order.path)
        except (WeightsMismatch, VersionSuperseded):
            self._version = before
            raise
        finally:
            if asleep:
                self._core.model_executor.sleep(self._sleep_level)
        self._version = order.version
        self._signed_by = "" if order.source is None else order.source.publisher
        # No salt leads to it any more; what running turns hold stays.
        if not self._by_key:
            self._core.reset_prefix_cache()

    def _withdraw(self, turns: Sequence[_Turn]) -> None:
        """Take turns back from vLLM; they begin again here, before all others, with what they have as their prompt."""
        taken = [turn for turn in turns if turn.key]
        self._core.abort_requests([turn.key for turn in taken])
        for turn in taken:
            del self._by_key[turn.key]
            turn.key, turn.core = "", None
        self._held = {turn.request.request_id: turn for turn in taken} | self._held

    # Sleep

    def _fall_asleep(self) -> None:
        if self._asleep:
            return
        self._asleep = True
        self._abort(list(self._turns))
        # vLLM lets go of aborted ones in its next iteration.
        while self._core.scheduler.has_requests():
            self._iterate()
        self._core.reset_prefix_cache()
        if self._sleep_level:
            self._core.model_executor.sleep(self._sleep_level)
        self._say([])

    def _awake(self) -> None:
        if self._asleep and self._sleep_level:
            self._core.model_executor.wake_up(None)
            if self._sleep_level > 1:
                self._ranks("rewrite")
        self._asleep = False

    # Turns

    def _admit(self) -> None:
        if self._asleep or self._version is None or self._orders:
            return
        held, self._held = self._held, {}
        for turn in held.values():
            self._give(turn)

    def _give(self, turn: _Turn) -> None:
        self._keys += 1
        turn.key = str(self._keys)
        request, wanted = turn.request, turn.request.sampling
        drawn = {
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            "top_k": wanted.top_k,
            "max_tokens": wanted.max_new_tokens - turn.position,
            "stop_token_ids": list(wanted.stop_token_ids),
            "logprobs": 0,
            "extra_args": {ARGUMENT: (wanted.noise_seed, turn.position)},
        }
        self._by_key[turn.key] = turn
        # A turn that has moved has waited before.
        priority = 1 if request.recompute or turn.generated else 2
        turn.core = self._ask(turn.key, request.token_ids + turn.generated, drawn, priority)

    def _ask(self, key: str, token_ids: list[int], drawn: dict[str, Any], priority: int) -> Any:
        """Give vLLM a request; returns its own record of it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        asked = EngineCoreRequest(
            request_id=key,
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=SamplingParams(ignore_eos=True, detokenize=False, **drawn),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter() if self._adapts else None,
            cache_salt=f"{self._version} {self._signed_by}",
            data_parallel_rank=None,
            priority=priority,
        )
        found = Request.from_engine_core_request(asked, self._core.request_block_hasher)
        self._core.add_request(found)
        return found

    def _iterate(self) -> None:
        begun_ns = time.monotonic_ns()
        self._planned = None
        outputs, ran = self._core.step_fn()
        self._core.post_step(ran)
        load = self._computed()
        chunks: list[TokenChunk] = []
        for each in outputs.values():
            self._note_queue(each.scheduler_stats)
            for out in each.outputs:
                if out.request_id == PROOF_KEY and out.new_prompt_logprobs_tensors is not None:
                    self._proof = out.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
            chunks += [self._chunk(turn, out) for out in each.outputs if (turn := self._by_key.get(out.request_id))]
        self._say(chunks, time.monotonic_ns() - begun_ns if ran else 0, load)

    def _chunk(self, turn: _Turn, output: Any) -> TokenChunk:
        token_ids: list[int] = output.new_token_ids
        logprobs = [float(row[0]) for row in output.new_logprobs.logprobs] if token_ids else []
        finish, detail = _finish(output), ""
        if (wrong := unsound_logprob(logprobs)) is not None:
            detail = f"vLLM gave a token the log-probability {wrong:g}: the model's logits are not finite"
            token_ids, logprobs, finish = [], [], FinishReason.ERROR
        stats = None if turn.reported else output.prefill_stats
        chunk = TokenChunk(
            turn.request.request_id,
            turn.position,
            token_ids,
            logprobs,
            NO_VERSION if self._version is None else self._version,
            finish,
            stats.num_cached_tokens if stats else 0,
            stats.num_computed_tokens if stats else 0,
            detail,
        )
        turn.reported |= stats is not None
        turn.position += len(token_ids)
        turn.generated += token_ids
        if finish is not None:
            if detail:
                self._withdraw([turn])
            self._forget(turn)
        return chunk

    def _last(self, turn: _Turn, finish: FinishReason) -> TokenChunk:
        version = NO_VERSION if self._version is None else self._version
        return TokenChunk(turn.request.request_id, turn.position, [], [], version, finish)

    def _forget(self, turn: _Turn) -> None:
        name = turn.request.request_id
        del self._turns[name]
        self._held.pop(name, None)
        self._by_key.pop(turn.key, None)

    def _watch_schedule(self) -> None:
        """Notes what vLLM's scheduler plans for each step: the step's own result does not say what it computed."""
        schedule = self._core.scheduler.schedule

        def watched(*arguments: Any) -> Any:
            self._planned = schedule(*arguments)
            return self._planned

        self._core.scheduler.schedule = watched

    def _computed(self) -> IterationLoad:
        decode = prefill = recompute = 0
        scheduled = self._planned.num_scheduled_tokens if self._planned is not None else {}
        for key, count in scheduled.items():
            turn = self._by_key.get(key)
            if turn is None:
                continue
            begin = turn.core.num_computed_tokens - count
            if count == 1 and begin >= turn.core.num_prompt_tokens:
                decode += 1
            elif turn.request.recompute and not turn.prefilled_once:
                recompute += count
            else:
                prefill += count
            turn.prefilled_once |= turn.core.num_computed_tokens >= turn.core.num_prompt_tokens
        return IterationLoad(decode, prefill, recompute)

    def _note_queue(self, stats: Any) -> None:
        if stats is None or stats.prefix_cache_stats is None:
            return
        cache = stats.prefix_cache_stats
        self._prefix_hit_tokens += cache.hits + cache.preempted_hits
        self._prompt_tokens += cache.queries + cache.preempted_queries

    def _say(self, chunks: list[TokenChunk], ns: int = 0, load: IterationLoad = NO_LOAD) -> None:
        scheduler, blocks = self._core.scheduler, self._core.vllm_config.cache_config.num_gpu_blocks
        running, waiting = scheduler.get_request_counts()
        used = round(scheduler.kv_cache_manager.usage * blocks)
        queued = m.Queue(waiting + len(self._held), running, used, self._prefix_hit_tokens, self._prompt_tokens)
        self._line.send(m.Iterated(chunks, queued, ns, load))


def _is_waiting(turn: _Turn) -> bool:
    """Whether vLLM has computed nothing of it yet."""
    return turn.core.num_computed_tokens == 0 and not turn.core.num_output_tokens


def _finish(output: Any) -> FinishReason | None:
    if output.finish_reason is None:
        return None
    try:
        return {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}[str(output.finish_reason)]
    except KeyError:
        return FinishReason.STALLED


def _failure(call: int, error: Exception) -> m.Reply:
    refused = getattr(error, "refused", ())
    report = PullReport(size_bytes=0, full_bytes=0, refused=tuple(refused)) if refused else None
    return m.Reply(call, type(error).__name__, str(error), report)


def build_core(begin: m.Begin) -> Any:
    """vLLM's engine core for the model, with weights that mean nothing yet, or for the base."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    with tempfile.TemporaryDirectory(prefix="elastic-model-") as directory:
        (Path(directory) / "config.json").write_text(dumps(begin.model_config))
        config = EngineArgs(**{"model": directory, **begin.arguments}).create_engine_config()
        return EngineCore(config, Executor.get_class(config), log_stats=True)


def _die_at_once() -> None:
    """After a fault write Python's stacks, and no more.

    Libraries of vLLM would look up their own symbols first: seconds in which its turns wait for its end.
    """
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()


def main(descriptor: int) -> NoReturn:
    """Serve the worker at the other end of the socket."""
    line = m.Line.of_vllm(Connection(descriptor))
    inbox = Inbox(line)
    begin: m.Begin = inbox.take(None)
    try:
        core = build_core(begin)
    except Exception as error:
        line.send(m.Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:REASON_CHARACTERS]))
        os._exit(1)
    _die_at_once()
    config = core.vllm_config
    from vllm.platforms import current_platform

    line.send(
        m.Up(
            current_platform.device_type,
            config.model_config.max_model_len,
            config.cache_config.num_gpu_blocks,
        )
    )
    VllmProcess(core, line, inbox, begin.sleep_level).run()


if __name__ == "__main__":
    main(int(os.environ["ELASTIC_VLLM_SOCKET"]))
