"""A rollout engine as rates: continuous batching, with every stretch of equal iterations folded into one event.

An iteration decodes one token of each running sequence and prefills up to one chunk of uncached tokens; the profile
gives its time. Iterations are equal as long as no sequence joins or ends and memory suffices, so the model computes a
*span* of them at once. Source: the batching is that of `elastic.engine.torch.scheduler` (Orca, Sarathi-Serve).
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from elastic.core.types import NS_PER_S, Account, Chunk, FinishReason, Nanoseconds, TurnId, WeightMode
from elastic.simulation.loop import EventLoop
from elastic.simulation.performance.lending import LentShareModel
from elastic.simulation.performance.prefix_cache import PrefixCache, Prompt
from elastic.simulation.performance.profile import EngineRates

CREEP = 1e-12
"""Context costs below this many seconds per iteration count as zero."""


@dataclass(slots=True, eq=False)
class Job:
    """One attempt at a turn of `length` tokens in all, of which `start` are accepted already.

    Jobs with the same `shared` key have the same first `shared_tokens` tokens of context.
    """

    turn: TurnId
    attempt: int
    trajectory: str
    shared: str
    context: int
    """Tokens of the prompt and of the accepted part of the answer."""
    start: int
    length: int
    longest: int
    shared_tokens: int = 0
    recompute: bool = False
    slot: int = 0
    position: int = field(init=False)
    reported: int = field(init=False)
    admissions: int = 0
    cached: int = 0
    """Tokens that the first admission found in the prefix cache."""
    cacheable: bool = True
    decoding: bool = False
    joined: int = 0
    """Set while the job decodes: its position is the engine's clock minus this."""
    prefill_left: int = 0
    prefilled: int = 0
    prompt: Prompt | None = None
    """The prompt that the job shares with others while it runs. The prompt's KV memory counts once for all of them."""
    behind: int = 0
    """How many of the job's tokens are in the shared prompt."""
    running: bool = False
    told: bool = False

    def __post_init__(self) -> None:
        self.position = self.reported = self.start

    @property
    def finish(self) -> FinishReason:
        return FinishReason.LENGTH if self.length >= self.longest else FinishReason.STOP


_Shares = Sequence[tuple[Account, float]]


@dataclass(slots=True)
class _IterationSpan:
    """`iterations` equal iterations from `begin_ns` on. All take `whole_ns`; number i takes `first_s + i * growth_s`.

    Their time goes to `account`, except for the `shares` of other accounts.
    """

    begin_ns: Nanoseconds
    iterations: int
    first_s: float
    growth_s: float
    account: Account
    shares: _Shares
    prefill: Sequence[tuple[Job, int]]
    whole_ns: Nanoseconds = 0

    def __post_init__(self) -> None:
        self.whole_ns = self.length_ns(self.iterations)

    def keep_first(self) -> None:
        """Drop all iterations after the first."""
        self.iterations = 1
        self.whole_ns = self.length_ns(1)

    def drop_first(self, iterations: int) -> None:
        """Remove `iterations` finished iterations. The span then begins where they end."""
        self.begin_ns += self.length_ns(iterations)
        self.first_s += iterations * self.growth_s
        self.iterations -= iterations
        self.whole_ns = self.length_ns(self.iterations)

    def length_ns(self, iterations: int) -> Nanoseconds:
        n = iterations
        return round((n * self.first_s + self.growth_s * n * (n - 1) / 2) * NS_PER_S)

    def done_by(self, elapsed_ns: Nanoseconds) -> int:
        """Return the whole iterations within a time."""
        if elapsed_ns >= self.whole_ns:
            return self.iterations
        elapsed_s = elapsed_ns / NS_PER_S
        if self.growth_s <= CREEP:
            count = int(elapsed_s / self.first_s)
        else:
            b = self.first_s - self.growth_s / 2
            count = int((math.sqrt(b * b + 2 * self.growth_s * elapsed_s) - b) / self.growth_s)
        count = max(0, min(self.iterations, count))
        while count < self.iterations and self.length_ns(count + 1) <= elapsed_ns:
            count += 1
        while count and self.length_ns(count) > elapsed_ns:
            count -= 1
        return count


class EngineModel:
    """`emit` gets chunks when they are sent. Callers read and change the engine in the order of the loop's time."""

    def __init__(
        self,
        loop: EventLoop,
        rates: EngineRates,
        emit: Callable[[Sequence[Chunk]], None],
        flush_ns: Nanoseconds,
        share: LentShareModel | None = None,
    ) -> None:
        self.version: int | None = None
        self.asleep = False
        self.idle_account = Account.LOADING
        self.iterations = 0
        self.decoded_tokens = 0
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self.accounts_ns: dict[Account, int] = {}
        self._loop = loop
        self._rates = rates
        self._emit = emit
        self._flush_ns = flush_ns
        self._share = share
        self._cache = PrefixCache(rates.kv_block_tokens)
        self._jobs: dict[TurnId, Job] = {}
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: dict[TurnId, Job] = {}
        self._finishes: list[tuple[int, int, Job]] = []
        self._sequence = 0
        self._clock = 0
        """Decode iterations so far: every decoding job advances by one in each."""
        self._used_tokens = 0
        self._context_tokens = 0
        self._span: _IterationSpan | None = None
        self._generation = 0
        self._waits_for_device = False
        self._charged_ns = loop.now_ns
        self._fresh: list[Job] = []
        self._flush_due = False
        self._held: Callable[[], None] | None = None
        self._lets_finish = True
        self._applying = False
        self._closed = False

    # Wishes

    @property
    def executing(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def pending(self) -> int:
        return len(self._waiting)

    @property
    def holds_admissions(self) -> bool:
        """Whether the engine applies new weights before it begins new turns."""
        return self._held is not None or self._applying

    @property
    def kv_used_share(self) -> float:
        return min(1.0, self._used_tokens / self._rates.kv_tokens)

    def holds(self, turn: TurnId, attempt: int) -> bool:
        """Return whether the engine runs or has queued this attempt."""
        return (job := self._jobs.get(turn)) is not None and job.attempt == attempt

    @property
    def decode_s(self) -> float:
        """Return the time of one iteration of the decoding sequences."""
        batch = len(self._decoding)
        return self._rates.decode_s(batch) + self._rates.context_s * self._context_tokens if batch else 0.0

    def submit(self, job: Job) -> None:
        self._jobs[job.turn] = job
        self._waiting.append(job)
        self._cut()

    def abort(self, turn: TurnId, attempt: int) -> None:
        job = self._jobs.get(turn)
        if job is not None and job.attempt == attempt:
            self._settle()
            if turn in self._jobs:  # At this very moment it may have ended by itself.
                self._emit([self._ended(job, FinishReason.ABORTED)])
            self._cut()
            self._release_if_idle()

    def abort_all(self, finish: FinishReason = FinishReason.ABORTED) -> None:
        if self._jobs:
            self._settle()
            self._emit([self._ended(job, finish) for job in list(self._jobs.values())])
            self._cut()
            self._release_if_idle()

    def hold_admissions(self, then: Callable[[], None], mode: WeightMode = WeightMode.FINISH) -> None:
        """Begin no new turns. Call `then` once no turn runs, or after this iteration. `resume` ends the hold."""
        self._held, self._lets_finish = then, mode is WeightMode.FINISH
        if not self._lets_finish:
            self._cut()
        self._release_if_idle()

    def use_version(self, version: int, mode: WeightMode = WeightMode.FINISH) -> None:
        """Put new weights in force: drop everything cached and admit turns again.

        Running turns are computed again, or keep KV of several versions that no other turn may use.
        """
        self.flush()
        self._charge()
        started = [*self._decoding.values(), *self._prefilling]
        for job in reversed(started):
            if mode is WeightMode.KEEP:
                job.cacheable = False
            else:
                self._preempt(job)
        self.version = version
        self._cache.forget()
        self.resume()

    def resume(self) -> None:
        """Admit turns again, after new weights were applied or given up."""
        self._charge()
        self._applying = False
        self._cut()
        self._release_if_idle()

    def sleep(self) -> None:
        self.abort_all()
        self._charge()
        self.asleep = True
        self._cache.forget()

    def wake(self) -> None:
        self._charge()
        self.asleep = False
        self._cut()

    def set_idle_account(self, account: Account) -> None:
        self._charge()
        self.idle_account = account

    def sync(self) -> None:
        """Bring counters and accounts up to now."""
        self._settle()
        self._charge()

    def flush(self, unsent_ns: Nanoseconds = 0) -> None:
        """Send all generated tokens. With `unsent_ns`, omit those of the last `unsent_ns` nanoseconds."""
        self._settle()
        held = 0
        if unsent_ns and self._span is not None and self._span.first_s > 0:
            held = round(unsent_ns / NS_PER_S / self._span.first_s)
        chunks: list[Chunk] = []
        for job in self._jobs.values():
            upto = self._position(job) - held * job.decoding
            if upto > job.reported:
                chunks.append(self._chunk(job, upto))
        if chunks:
            self._emit(chunks)

    def close(self) -> None:
        self.sync()
        self._closed = True
        self._generation += 1
        self._span = None

    # Spans

    def _cut(self) -> None:
        """End the running span at the next boundary of an iteration, where everything is planned anew."""
        if self._closed:
            return
        span = self._span
        if span is None:
            if not self._waits_for_device:
                self._plan()
        elif span.iterations > 1:
            self._settle()
            if self._span is None:
                self._plan()
            elif self._span.iterations > 1:
                self._span.keep_first()
                self._run_span(self._span)

    def _plan(self) -> None:
        """Admit turns and begin the next span. Called at a boundary of an iteration."""
        if self._closed or self.asleep or self.version is None or self._span is not None or self._applying:
            return
        if not self._jobs or (self._held is not None and not (self._lets_finish and self._started)):
            self._release_if_idle()
            return
        if self._share is None:
            self._begin()
        elif not self._waits_for_device:
            self._ask_device(self._share)

    def _ask_device(self, share: LentShareModel) -> None:
        self._charge()
        self._waits_for_device = True
        until_ns = share.acquire()
        if until_ns is None:
            self._charge()
            self._waits_for_device = False
        elif until_ns <= self._loop.now_ns:
            self._charge()
            self._waits_for_device = False
            self._begin()
        else:
            self._loop.at(until_ns, lambda: None if self._closed else self._ask_device(share))

    def retry(self) -> None:
        """Ask for the device again."""
        self._cut()

    def _begin(self) -> None:
        if self._applying:
            return
        self._admit()
        self._make_room()
        prefill = self._chunked()
        batch = len(self._decoding)
        if not prefill and not batch:
            return
        rates, plain, again = self._rates, 0, 0
        for job, count in prefill:
            if job.recompute:
                again += count
            else:
                plain += count
        decode_s = self.decode_s
        growth_s = rates.context_s * batch if rates.context_s * batch > CREEP else 0.0
        plain_s, again_s = plain / rates.prefill_tokens_per_s, again / rates.prefill_tokens_per_s
        work_s = decode_s + plain_s + again_s
        account, shares = _shares(work_s, decode_s, plain_s, again_s) if prefill else (Account.DECODE, ())
        iterations, iteration_s = self._equal_iterations(prefill, batch), work_s + rates.overhead_s
        self._charge()
        self._run_span(_IterationSpan(self._loop.now_ns, iterations, iteration_s, growth_s, account, shares, prefill))

    def _equal_iterations(self, prefill: list[tuple[Job, int]], batch: int) -> int:
        count = 1 << 30
        if self._share is not None:
            return 1
        if prefill:
            (job, chunk), *more = prefill
            left = job.prefill_left // chunk if chunk else 0
            count = 1 if more or job.prefill_left <= chunk else max(1, left - (job.prefill_left % chunk == 0))
        if batch:
            count = min(count, max(1, self._next_finish() - self._clock))
            room = self._rates.kv_tokens - self._used_tokens
            count = min(count, max(1, room // batch))
        return count

    def _run_span(self, span: _IterationSpan) -> None:
        self._span = span
        self._generation += 1
        self._loop.at(span.begin_ns + span.whole_ns, partial(self._span_over, self._generation))

    def _span_over(self, generation: int) -> None:
        if generation == self._generation and not self._closed:
            self._settle()
            if self._span is None:
                self._plan()
            else:
                self._run_span(self._span)

    def _settle(self) -> None:
        """Count the finished iterations of the span. The rest of the span goes on."""
        span = self._span
        if span is None:
            return
        self._charge()
        done = span.done_by(self._loop.now_ns - span.begin_ns)
        if done == 0:
            return
        batch = len(self._decoding)
        self._clock += done
        self.iterations += done
        self.decoded_tokens += done * batch
        self._used_tokens += done * batch
        self._context_tokens += done * batch
        if done == span.iterations:
            self._span = None  # Its event still comes, and plans what follows.
        else:
            span.drop_first(done)
        chunks = self._finished()
        if span.prefill:
            chunks += self._prefilled(span, done)
        if chunks:
            self._emit(chunks)
        self._release_if_idle()

    def _finished(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self._decoding and self._next_finish() <= self._clock:
            job = heapq.heappop(self._finishes)[2]
            chunks.append(self._ended(job, job.finish))
        return chunks

    def _prefilled(self, span: _IterationSpan, done: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for job, count in span.prefill:
            if not job.running or job.decoding:
                continue
            computed = min(job.prefill_left, count * done)
            job.prefill_left -= computed
            job.prefilled += computed
            if job.cacheable and job.behind + self._rates.kv_block_tokens < job.shared_tokens:
                self._share_prompt(job)
            if job.prefill_left:
                continue
            self._prefilling.remove(job)
            self._join(job)
            if job.position >= job.length:
                chunks.append(self._ended(job, job.finish))
            elif job.reported == job.position - 1:
                self._fresh.append(job)
                self._arm_flush()
        return chunks

    def _share_prompt(self, job: Job) -> None:
        """Let later members of the job's group use what the job has computed of their prompt."""
        computed = job.context + job.position - job.start - job.prefill_left
        prompt = self._cache.share(job.shared, min(computed, job.shared_tokens - 1), job.prompt)
        if prompt is not None:
            job.prompt, job.behind = prompt, prompt.tokens

    def _join(self, job: Job) -> None:
        """Start decoding: the iteration that ends a prefill samples the next token."""
        job.position += 1
        self.decoded_tokens += 1
        job.decoding = True
        job.joined = self._clock - job.position
        self._used_tokens += 1
        self._context_tokens += job.context + job.position - job.start
        self._decoding[job.turn] = job
        self._sequence += 1
        heapq.heappush(self._finishes, (job.joined + job.length, self._sequence, job))

    def _next_finish(self) -> int:
        """Return the clock at which the first decoding job ends. Drops entries of jobs that have left."""
        while True:
            at, _, job = self._finishes[0]
            if job.decoding and job.joined + job.length == at:
                return at
            heapq.heappop(self._finishes)

    # Sequences

    @property
    def _started(self) -> bool:
        return bool(self._prefilling or self._decoding)

    def _admit(self) -> None:
        """Admit queued jobs until the next chunk of prefill is full."""
        if not self._waiting:
            return
        rates, cache = self._rates, self._cache
        chunk = rates.prefill_chunk_tokens - sum(job.prefill_left for job in self._prefilling)
        while chunk > 0 and self._waiting and self._held is None and self.executing < rates.max_batch:
            job = self._waiting[0]
            tokens = job.context + job.position - job.start
            lacking = tokens - (rates.kv_tokens - self._used_tokens)
            if lacking > 0 and self.executing and lacking > cache.in_use(job.shared):
                return
            self._waiting.popleft()
            cached, prompt = cache.take(job.trajectory, job.shared, tokens)
            if prompt is not None:
                job.prompt, job.behind = prompt, prompt.tokens
            job.running = True
            job.prefill_left = tokens - cached
            chunk -= job.prefill_left
            job.admissions += 1
            if job.admissions == 1:
                job.cached = cached
            self.prompt_tokens += tokens
            self.prefix_hit_tokens += cached
            self._used_tokens += tokens - (job.behind if prompt is not None and prompt.users > 1 else 0)
            cache.shrink_to(rates.kv_tokens - self._used_tokens)
            self._prefilling.append(job)

    def _make_room(self) -> None:
        """Free room for one token of every decoding sequence by preempting the newest sequences."""
        self._cache.shrink_to(self._rates.kv_tokens - self._used_tokens - len(self._decoding))
        while self._rates.kv_tokens - self._used_tokens < len(self._decoding) and self.executing > 1:
            newest = self._prefilling[-1] if self._prefilling else next(reversed(self._decoding.values()))
            self._preempt(newest)

    def _chunked(self) -> list[tuple[Job, int]]:
        chunk = self._rates.prefill_chunk_tokens
        work: list[tuple[Job, int]] = []
        for job in self._prefilling:
            if not chunk:
                break
            count = min(job.prefill_left, chunk)
            chunk -= count
            work.append((job, count))
        return work

    def _preempt(self, job: Job) -> None:
        """Return the job to the front of the queue. Its KV is computed again."""
        self._leave(job)
        if job.prompt is not None:
            self._leave_prompt(job, job.prompt)
        job.recompute, job.cacheable = False, True
        self._waiting.appendleft(job)

    def _leave(self, job: Job) -> None:
        """Remove the job from the batch and free its memory."""
        if job.decoding:
            job.position = self._position(job)
            del self._decoding[job.turn]
            self._context_tokens -= job.context + job.position - job.start
        else:
            self._prefilling.remove(job)
        self._used_tokens -= job.context + job.position - job.start - job.behind
        job.running = job.decoding = False

    def _leave_prompt(self, job: Job, prompt: Prompt) -> None:
        """Release the shared prompt after the job's own tokens, so that the cache forgets the prompt last."""
        self._used_tokens -= self._cache.leave(job.shared, prompt)
        job.prompt, job.behind = None, 0

    def _position(self, job: Job) -> int:
        return self._clock - job.joined if job.decoding else job.position

    def _ended(self, job: Job, finish: FinishReason) -> Chunk:
        if job.running:
            decoding = job.decoding
            self._leave(job)
            if decoding and job.cacheable:
                self._cache.keep(job.trajectory, job.context + job.position - job.start - 1, job.behind)
            if job.prompt is not None:
                self._leave_prompt(job, job.prompt)
            room = self._rates.kv_tokens - self._used_tokens
            if self._cache.tokens > room:
                self._cache.shrink_to(room)
        else:
            self._waiting.remove(job)
        del self._jobs[job.turn]
        return self._chunk(job, job.position, finish)

    def _chunk(self, job: Job, upto: int, finish: FinishReason | None = None) -> Chunk:
        start, job.reported = job.reported, upto
        version = -1 if self.version is None else self.version
        prefilled = 0 if job.told else job.prefilled
        job.told = True
        cached = job.cached if prefilled else 0
        return Chunk(job.slot, start, upto - start, version, finish, "", prefilled, cached)

    def _arm_flush(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.after(self._flush_ns, self._flush_fresh)

    def _flush_fresh(self) -> None:
        self._flush_due = False
        if self._closed:
            return
        self._settle()
        fresh, self._fresh = self._fresh, []
        chunks = []
        for job in fresh:
            if job.decoding:
                job.position = self._position(job)
                if job.position > job.reported:
                    chunks.append(self._chunk(job, job.position))
        if chunks:
            self._emit(chunks)

    def _release_if_idle(self) -> None:
        if self._held is None or self._applying:
            return
        if self._span is None and not (self._lets_finish and self._started):
            self._charge()
            self._applying = True
            apply, self._held = self._held, None
            apply()

    # Accounts

    def _charge(self) -> None:
        now_ns = self._loop.now_ns
        elapsed_ns = now_ns - self._charged_ns
        if elapsed_ns <= 0:
            return
        self._charged_ns = now_ns
        accounts_ns, span, left_ns = self.accounts_ns, self._span, elapsed_ns
        for account, share in span.shares if span is not None else ():
            ns = min(left_ns, round(elapsed_ns * share))
            accounts_ns[account] = accounts_ns.get(account, 0) + ns
            left_ns -= ns
        account = self._resting_account() if span is None else span.account
        accounts_ns[account] = accounts_ns.get(account, 0) + left_ns

    def _resting_account(self) -> Account:
        """Return the account of the time between spans."""
        if self._applying:
            return Account.APPLYING
        if self.asleep:
            return Account.ASLEEP
        return Account.SERVING if self._waits_for_device else self.idle_account


def _shares(work_s: float, decode_s: float, plain_s: float, again_s: float) -> tuple[Account, _Shares]:
    """Divide the time of a mixed iteration by the costs of its parts: one account, and the shares of the others."""
    costs = ((Account.DECODE, decode_s), (Account.PREFILL, plain_s), (Account.RECOMPUTE, again_s))
    *others, (account, _) = [(account, cost_s) for account, cost_s in costs if cost_s]
    return account, [(other, cost_s / work_s) for other, cost_s in others]
