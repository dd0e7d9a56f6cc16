"""The worker's side of vLLM: a process of its own that is started, watched, and started again when it dies.

- The process and this one are the two ends of a pair of sockets; there is no other way in.
- What runs when the process dies ends as STALLED, so that it goes on elsewhere. The next process pulls the weights that
  were in force before; until then there is no credit. One death too many ends the worker.
- All figures are vLLM's own, so a watch for stalls sees vLLM's queue.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from elastic.config import EngineConfig
from elastic.core.types import Account, Capabilities, FinishReason, WeightMode
from elastic.engine import validation
from elastic.engine.base import (
    BF16_NOISE,
    NO_VERSION,
    PROOF_TOKENS,
    ChunkSink,
    EngineStatistics,
    GenerateRequest,
    TokenChunk,
    WeightsMismatch,
    proof_text,
)
from elastic.engine.meter import AccountMeter
from elastic.engine.torch.costs import LearnedCosts
from elastic.engine.torch.pacing import by_account
from elastic.engine.vllm import VllmSettings
from elastic.engine.vllm import messages as m
from elastic.system.outages import backoff
from elastic.system.supervision import signal_name
from elastic.weights.errors import VersionSuperseded, WeightsCorrupted, WeightsError
from elastic.weights.source import PullReport, RelaySource, TensorSource, WeightsSource

MEMORY_DIRECTORY = "/dev/shm"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ANSWER_S = 10.0
"""For the process to say that a time limit is over which it was given."""
RELOAD_TIMEOUT_S = 120.0
"""For the weights of a process that died to be in force in the next one."""

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (WeightsMismatch, VersionSuperseded, WeightsCorrupted, TimeoutError)
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its loop is ours
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose sampler takes no noise
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or several workers on a machine all take its first cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}

_log = structlog.get_logger(__name__)


class VllmDied(RuntimeError):
    """vLLM's process has ended; the request may be repeated."""


@dataclass(slots=True)
class _Live:
    request: GenerateRequest
    position: int


class VllmEngine:
    """`elastic.engine.base.RolloutEngine` over vLLM.

    Requests wait until the first `load_version`, and while the engine sleeps. Noise is that of the turn, but logits
    depend on what else is in a batch, so it is not replayable. Raises `ValueError` where vLLM does not start.
    Its process is one of this interpreter, `python`, and sees these of this process's `devices`, or all of them.
    """

    def __init__(
        self,
        model_config: Mapping[str, Any],
        config: EngineConfig,
        settings: VllmSettings,
        python: str = sys.executable,
        devices: Sequence[int] = (),
    ) -> None:
        self._model_config = dict(model_config)
        self._config = config
        self._settings = settings
        self._python = python
        self._seen_devices = _visible(devices)
        self._vocab_size = _vocab_size(model_config)
        self._changed = threading.Condition()
        self._sink: ChunkSink | None = None
        self._alive: dict[str, _Live] = {}
        self._waiting: list[m.Submit] = []
        """Requests that came while no vLLM process was there."""
        self._asleep = False
        self._resting: Account | None = None
        """Where its time goes while it gives its device to other jobs and until it has it back; None otherwise."""
        self._closed = False
        self._broken = ""
        """Why the engine is of no further use."""
        self._idle_account = Account.IDLE
        self._spends: Account | None = None
        self._meter = AccountMeter(time.monotonic_ns(), Account.IDLE)
        self._learned = LearnedCosts()
        self._queue = m.Queue(0, 0, 0, 0, 0)
        self._hits_before = self._prompts_before = 0
        """Tokens of processes before this one."""
        self._iterations = self._decoded_tokens = self._loads = 0
        self._received_bytes = self._received_before = 0
        self._version: int | None = None
        adapts = settings.base is not None and config.max_context_tokens > PROOF_TOKENS
        self._proof_text = proof_text(self._vocab_size) if adapts else []
        self._proof: Sequence[float] = ()
        self._in_force: RelaySource | None = None
        self._wanted: RelaySource | None = None
        self._calls = count(1)
        self._answers: dict[int, Future[m.Reply]] = {}
        self._finishing: set[int] = set()
        """Loads that wait for running turns."""
        self._restarts = 0
        """Deaths of vLLM's process that count towards `max_restarts`."""
        self._starting: subprocess.Popen[bytes] | None = None
        self._watching: threading.Thread | None = None
        self._line: m.Line | None
        self._up, self._process, self._line = self._start()
        self._up_since_s = time.monotonic()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="vllm",
            replayable_sampling=False,
            max_context_tokens=self._up.max_context_tokens,
            device=self._up.device,
            tflops=self._config.tflops,
            memory_gb_per_s=self._config.memory_gb_per_s,
            max_batch=self._config.max_batch,
            logprob_noise=BF16_NOISE,
        )

    def start(self, sink: ChunkSink) -> None:
        if self._sink is not None or self._closed:
            raise RuntimeError("the engine was started before")
        self._sink = sink
        self._watching = threading.Thread(target=self._watch, name="vllm", daemon=True)
        self._watching.start()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        ended: list[TokenChunk] = []
        with self._changed:
            self._refuse_closed()
            begun: list[GenerateRequest] = []
            for request in requests:
                if request.request_id in self._alive:
                    continue
                if (end := self._refusal(request)) is not None:
                    ended.append(end)
                    continue
                self._alive[request.request_id] = _Live(request, request.start)
                begun.append(request)
            self._charge()
            self._send(m.Submit(begun))
        self._emit(ended)

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            if alive := [name for name in request_ids if name in self._alive]:
                self._send(m.AbortRequests(alive))

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        self._wanted = source
        return self._prefetch(source, timeout_s)

    def _prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        reply = self._call(lambda call: m.Prefetch(call, source, timeout_s), timeout_s + ANSWER_S)
        assert reply.report is not None
        return reply.report

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        if isinstance(source, TensorSource):
            self._load_tensors(source, mode)
        else:
            text = self._proof_text
            self._load(lambda call: m.LoadVersion(call, source.version, mode, source, proof=text), source.version, mode)
            with self._changed:
                self._in_force = source
        return 0.0

    @property
    def proof(self) -> Sequence[float]:
        return self._proof

    def audit(self) -> bool:
        return self._call(m.Audit).sound

    def sleep(self) -> None:
        with self._changed:
            self._asleep = True
        self._call(m.SleepNow)
        with self._changed:
            self._charge()

    def wake(self) -> None:
        self._call(m.WakeUp)
        with self._changed:
            self._asleep = False
            self._charge()

    def set_idle_account(self, account: Account) -> None:
        with self._changed:
            self._idle_account = account
            self._charge()

    def statistics(self) -> EngineStatistics:
        """Raises `RuntimeError` once vLLM has died too often: there is nothing to be had of this engine any more."""
        with self._changed:
            if self._broken:
                raise RuntimeError(self._broken)
            now = self._queue
            unarmed = self._restarts > 0 and self._version is None
            usable = self._line is not None and not (self._asleep or self._resting or self._closed or unarmed)
            return EngineStatistics(
                pending=max(now.pending, len(self._alive) - now.executing),
                executing=now.executing,
                capacity_turns=self._config.max_batch + self._config.max_pending if usable else 0,
                kv_blocks_used=now.kv_blocks_used,
                kv_blocks_total=self._up.kv_blocks,
                prefix_hit_tokens=self._hits_before + now.prefix_hit_tokens,
                prompt_tokens=self._prompts_before + now.prompt_tokens,
                decoded_tokens=self._decoded_tokens,
                progress=self._iterations,
                accounts_ns=self._meter.read(time.monotonic_ns()),
                weights_version=self._version,
                asleep=self._asleep,
                waits_to_apply=bool(self._finishing),
                load_progress=self._loads,
                received_bytes=self._received_before + self._received_bytes,
            )

    def read_back(self, path: Path) -> None:
        """Write the live parameters of each rank to `path` with the rank's number behind it."""
        self._call(lambda call: m.ReadBack(call, str(path)))

    @property
    def process_id(self) -> int:
        """Return the id of vLLM's present process."""
        return self._process.pid

    def close(self) -> None:
        """End every live request with ABORTED, and vLLM's process. Safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._line is not None:
            self._line.hang_up()
        if self._starting is not None and self._starting is not self._process:
            _kill(self._starting)
        self._end_process()
        self._lose(FinishReason.ABORTED, "the engine is closed")
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join(self._settings.stop_timeout_s)

    # vLLM's process

    def _start(self) -> tuple[m.Up, "subprocess.Popen[bytes]", m.Line]:
        """Starts vLLM's process. Raises `ValueError` with vLLM's own message."""
        ours, theirs = socket.socketpair()
        environment = {
            **_DEFAULTS,
            **os.environ,
            **_ENVIRONMENT,
            **self._seen_devices,
            "OMP_NUM_THREADS": str(self._config.threads),
            "ELASTIC_VLLM_SOCKET": str(theirs.fileno()),
        }
        process = subprocess.Popen(
            [self._python, "-m", "elastic.engine.vllm.process"],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        theirs.close()
        self._starting = process
        connection = Connection(ours.detach())
        line = m.Line.of_worker(connection)
        with contextlib.ExitStack() as failing:
            failing.callback(_kill, process)
            failing.callback(line.hang_up)
            try:
                line.send(m.Begin(self._model_config, self._arguments(), self._settings.sleeps))
                if not connection.poll(self._settings.start_timeout_s):
                    raise ValueError(
                        f"engine.vllm.start_timeout_s: vLLM did not start in {self._settings.start_timeout_s:g} s; "
                        "on an idle machine it takes up to 60 s, and longer where several start at once"
                    )
                up = line.receive()
            except (OSError, EOFError):
                line.hang_up()
                how = _how(process)
                raise ValueError(f"engine.kind: vLLM's process ended as it started: {how}{_remedy(how)}") from None
            if isinstance(up, m.Failed):
                raise ValueError(f"engine.kind: vLLM did not start: {up.reason}{_remedy(up.reason)}")
            dtype = self._settings.arguments.get("dtype", "bfloat16")
            if up.device == "cpu" and self._settings.base is None and dtype != "bfloat16":
                raise ValueError(
                    f"engine.vllm.arguments.dtype: on a CPU vLLM does not compute with new weights in {dtype!r}; "
                    "allowed: 'bfloat16'"
                )
            failing.pop_all()
        return up, process, line

    def _arguments(self) -> dict[str, Any]:
        config, settings = self._config, self._settings
        memory: dict[str, Any] = (
            {"num_gpu_blocks_override": config.kv_blocks}
            if settings.gpu_memory_utilization is None
            else {"gpu_memory_utilization": settings.gpu_memory_utilization}
        )
        adapting: dict[str, Any] = (
            {}
            if settings.base is None
            else {
                "model": str(settings.base),
                "load_format": "safetensors",
                "enable_lora": True,
                # The last place stays empty: on a CPU vLLM computes what has no adapter with that one.
                "max_loras": 2,
                "max_lora_rank": settings.adapter_rank,
            }
        )
        return {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": config.max_context_tokens,
            "max_num_seqs": config.max_batch,
            "max_num_batched_tokens": max(config.prefill_chunk_tokens, config.max_batch),
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "block_size": config.kv_block_tokens,
            "scheduling_policy": "priority",
            "async_scheduling": False,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": settings.tensor_parallel,
            "enforce_eager": settings.enforce_eager,
            "enable_sleep_mode": settings.sleeps > 0,
            "worker_extension_cls": "elastic.engine.vllm.extension.Extension",
            "logits_processors": ["elastic.engine.vllm.sampling:NoiseRows"],
            **memory,
            **adapting,
            **settings.arguments,
        }

    def _watch(self) -> None:
        """Reads messages of vLLM's process; when it dies, of its successor."""
        while not self._closed:
            line = self._line
            if line is not None:
                with contextlib.suppress(OSError, EOFError):
                    while True:
                        self._take(line.receive())
            if self._closed:
                return
            self._died()
            if not self._start_again():
                return

    def _died(self) -> None:
        how = _how(self._process)
        _log.warning("vLLM's process has ended", how=how)
        with self._changed:
            self._line = None
            self._version = None
            self._spends = None
            self._finishing.clear()
            self._hits_before += self._queue.prefix_hit_tokens
            self._prompts_before += self._queue.prompt_tokens
            self._queue = m.Queue(0, 0, 0, 0, 0)
            self._received_before += self._received_bytes
            self._received_bytes = 0
            self._meter.switch(time.monotonic_ns(), {Account.BOOTING: 1.0})
        self._end_process()
        self._lose(FinishReason.STALLED, f"vLLM's process ended: {how}")

    def _start_again(self) -> bool:
        settings, why = self._settings, ""
        with self._changed:
            if self._resting is not None:
                self._broken = "vLLM's process has ended while another job had its device"
                self._changed.notify_all()
                return False
        if time.monotonic() - self._up_since_s >= settings.restart_reset_s:
            self._restarts = 0
        while not self._closed:
            self._restarts += 1
            if self._restarts > settings.max_restarts:
                with self._changed:
                    self._broken = (
                        f"vLLM's process has ended {self._restarts} times, more than engine.vllm.max_restarts = "
                        f"{settings.max_restarts} allows{why}"
                    )
                    self._changed.notify_all()
                return False
            pause_s = backoff(self._restarts - 1, settings.restart_base_s, settings.restart_max_s)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)
            try:
                up, process, line = self._start()
            except ValueError as error:
                why = f"; at last: {error}"
                _log.warning("vLLM not started again", reason=str(error))
                continue
            with self._changed:
                self._up, self._process, self._line = up, process, line
                self._up_since_s = time.monotonic()
                self._changed.notify_all()
                if self._closed:
                    line.hang_up()
                    _kill(process)
                    return False
                if self._asleep:
                    self._line.send(m.SleepNow(0))
                waiting, self._waiting = self._waiting, []
                for submitted in waiting:
                    self._line.send(submitted)
                self._charge()
            threading.Thread(target=self._restore, name="restore", daemon=True).start()
            return True
        return False

    def _restore(self) -> None:
        """Put the weights in force that the process before had, if nobody has ordered others by now."""
        source = self._in_force
        if source is None or source is not self._wanted:
            return
        try:
            self._prefetch(source, RELOAD_TIMEOUT_S)
            self.load_version(source, WeightMode.FINISH)
        except (WeightsError, WeightsMismatch, RuntimeError, TimeoutError) as error:
            _log.warning("weights not restored", version=source.version, reason=str(error))

    def _end_process(self) -> None:
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._settings.stop_timeout_s if self._closed else 0.0)
        _kill(process)

    def _lose(self, finish: FinishReason, detail: str) -> None:
        """Ends all running turns, and fails all calls that wait for an answer."""
        with self._changed:
            lost, self._alive = list(self._alive.values()), {}
            answers, self._answers = list(self._answers.values()), {}
            self._waiting.clear()
            if self._closed:
                self._charge()
        self._emit([self._end(live.request, finish, detail, live.position) for live in lost])
        for answer in answers:
            answer.set_exception(RuntimeError(detail) if self._closed else VllmDied(detail))

    # What it says

    def _take(self, message: m.FromVllm) -> None:
        match message:
            case m.Iterated():
                self._emit(self._note(message))
            case m.Spends(account):
                with self._changed:
                    self._finishing.clear()
                    self._spends = account
                    self._charge()
            case m.PrefetchProgress(received_bytes):
                self._received_bytes = received_bytes
            case m.Reply():
                with self._changed:
                    answer = self._answers.pop(message.call, None)
                if answer is not None:
                    answer.set_result(message)
            case m.Up() | m.Failed():
                pass

    def _note(self, iteration: m.Iterated) -> list[TokenChunk]:
        """Books the iteration; returns its chunks of turns that are alive."""
        chunks: list[TokenChunk] = []
        with self._changed:
            for chunk in iteration.chunks:
                live = self._alive.get(chunk.request_id)
                if live is None:
                    continue
                live.position = chunk.start + len(chunk.token_ids)
                if chunk.finish is not None:
                    del self._alive[chunk.request_id]
                self._decoded_tokens += len(chunk.token_ids)
                chunks.append(chunk)
            self._queue = iteration.queue
            if iteration.ns:
                self._iterations += 1
                load = iteration.load
                if spent := by_account(load, self._learned.costs(load)):
                    self._meter.settle(time.monotonic_ns(), spent)
                    self._learned.observe(load, iteration.ns / 1e9)
            self._charge()
        return chunks

    def _emit(self, chunks: list[TokenChunk]) -> None:
        if not chunks or self._sink is None:
            return
        try:
            self._sink(chunks)
        except Exception:
            _log.exception("the sink of an engine's chunks failed")

    def _charge(self) -> None:
        """From now on: what the process says it does, sleep, decoding (corrected when it is known), or idleness."""
        if self._line is None and not self._closed:
            return
        if self._resting is not None:
            account = self._resting
        elif self._spends is not None:
            account = self._spends
        elif self._asleep:
            account = Account.ASLEEP
        else:
            account = Account.DECODE if self._alive and self._version is not None else self._idle_account
        self._meter.switch(time.monotonic_ns(), {account: 1.0})

    # What it is told

    def _send(self, message: m.Submit | m.AbortRequests) -> None:
        if self._line is None:
            if isinstance(message, m.Submit):
                self._waiting.append(message)
            return
        with contextlib.suppress(OSError):  # the watching thread finds out
            self._line.send(message)

    def _call(self, message: Any, timeout_s: float | None = None) -> m.Reply:
        """Raises what the process answers, or `VllmDied`. With a time limit a process that starts is waited for."""
        call, answer = next(self._calls), Future[m.Reply]()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._refuse_closed()
            if self._sink is None:
                raise RuntimeError("the engine is not started")
            if not self._changed.wait_for(lambda: self._line or self._broken or self._closed, timeout_s or 0.0):
                raise VllmDied("vLLM's process has ended, and the next one is not there yet")
            if self._line is None:
                raise VllmDied(self._broken or "the engine is closed")
            self._answers[call] = answer
            with contextlib.suppress(OSError):
                self._line.send(message(call))
        reply = answer.result(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        if reply.error:
            error = _ERRORS.get(reply.error, RuntimeError)(reply.detail)
            if isinstance(error, RuntimeError):
                error = WeightsError(f"{reply.error}: {reply.detail}")
            if isinstance(error, WeightsError) and reply.report is not None:
                error.refused = reply.report.refused
            raise error
        return reply

    def _load(self, message: Any, version: int, mode: WeightMode) -> None:
        mark = next(self._calls)
        with self._changed:
            if mode is WeightMode.FINISH and self._alive:
                self._finishing.add(mark)
        try:
            reply = self._call(message)
        finally:
            with self._changed:
                self._finishing.discard(mark)
                self._spends = None
                self._charge()
        with self._changed:
            self._version, self._proof = version, reply.proof
            self._loads += 1
            self._charge()

    def _load_tensors(self, source: TensorSource, mode: WeightMode) -> None:
        """By way of a file in memory: the process cannot see ours."""
        from safetensors.torch import save_file

        directory = MEMORY_DIRECTORY if os.path.isdir(MEMORY_DIRECTORY) else None
        with tempfile.TemporaryDirectory(prefix="elastic-weights-", dir=directory) as kept:
            path = str(Path(kept) / "weights.safetensors")
            save_file(dict(source.tensors), path)  # type: ignore[arg-type]
            text = self._proof_text
            self._load(lambda call: m.LoadVersion(call, source.version, mode, None, path, text), source.version, mode)

    def _refusal(self, request: GenerateRequest) -> TokenChunk | None:
        most = self._config.max_context_tokens
        if (why := validation.refusal(request, self._vocab_size, most)) is not None:
            return self._end(request, FinishReason.ERROR, why, request.start)
        if validation.is_complete(request, most):
            return self._end(request, FinishReason.LENGTH, "", request.start)
        return None

    def _end(self, request: GenerateRequest, finish: FinishReason, detail: str, position: int) -> TokenChunk:
        version = NO_VERSION if self._version is None else self._version
        return TokenChunk(request.request_id, position, [], [], version, finish, detail=detail)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


def _vocab_size(model_config: Mapping[str, Any]) -> int:
    """Models of several parts have their text's own section."""
    found = model_config.get("vocab_size") or model_config.get("text_config", {}).get("vocab_size")
    if not isinstance(found, int):
        raise ValueError("model.checkpoint: its config.json names no vocab_size")
    return found


def _visible(devices: Sequence[int]) -> dict[str, str]:
    """The variable by which a process sees these GPUs alone, of those that this one sees."""
    if not devices:
        return {}
    named = os.environ.get(VISIBLE_DEVICES, "")
    ours = named.split(",") if named else []
    return {VISIBLE_DEVICES: ",".join(ours[one] if one < len(ours) else str(one) for one in devices)}


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def _how(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it hung up"
    if code >= 0:
        return f"exit code {code}"
    by_system = " (by the system, where the machine's memory has run out)" if -code == signal.SIGKILL else ""
    return f"signal {signal_name(-code)}{by_system}"


def _remedy(reason: str) -> str:
    """A hint for the user, for reasons that are known; else empty."""
    if "memory" in reason.lower():
        return "; fewer engine.kv_blocks or a smaller engine.vllm.gpu_memory_utilization take less"
    if "block size" in reason:
        return (
            "; engine.kv_block_tokens must be one that its attention can have: multiples of 32 on a CPU, of 16 on a GPU"
        )
    if "rchitecture" in reason or "model type" in reason:
        return "; model.checkpoint must be of an architecture that this vLLM knows"
    return ""
