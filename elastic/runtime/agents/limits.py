"""What agents may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.core.types import SamplingParameters
from elastic.protocol.front_messages import WantedSampling
from elastic.protocol.sampled import TOKEN_BYTES
from elastic.runtime.agents.refusals import CallRefused
from elastic.runtime.agents.upstream import UpstreamBounds

TEMPERATURE_MIN = 0.01
"""Above zero. Of a lower one logits are soon no numbers, and vLLM takes it for this one."""
TEMPERATURE_MAX = 2.0


@dataclass(frozen=True, slots=True)
class EpisodeTimes:
    """From the first trajectory of a group to the end of its last, and how long one stays open without a call."""

    deadline_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSampling:
    """How turns of evaluations are sampled. Where nothing is said agents choose their temperature, and the rest is as
    of the run's other turns."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """`sampling` is the run's: of each turn its most tokens, its temperature and the tokens at which it stops."""

    sampling: SamplingParameters
    pinned: frozenset[str]
    max_turns: int
    max_context_tokens: int
    vocab_size: int
    open_turns_max: int
    deadline_s: float
    idle_s: float
    of_environments: Mapping[str, EpisodeTimes] = field(default_factory=dict[str, EpisodeTimes])
    """Where these are others than `deadline_s` and `idle_s`, by the environment's name."""
    played: frozenset[str] = frozenset()
    """The environments whose trajectories env workers play, so that agents elsewhere are given none of them."""
    policies: tuple[str, ...] = ()
    """Further names of the model, each of which stands for a policy of its own."""
    upstream: UpstreamBounds | None = None
    """The bounds of calls of models elsewhere; None where there are no such models."""
    evaluation: EvaluatedSampling = EvaluatedSampling()

    def times(self, environment: str | None) -> EpisodeTimes:
        known = None if environment is None else self.of_environments.get(environment)
        return known or EpisodeTimes(self.deadline_s, self.idle_s)

    def check_policy(self, policy: str, status: int) -> None:
        """Raises `CallRefused` for a name that no policy has."""
        if policy and policy not in self.policies:
            known = ", ".join(map(repr, self.policies)) or "none has a name of its own (front.policies)"
            raise CallRefused(
                status, "unknown_policy", f"no policy {policy!r}; allowed: {known}", param="policy", retry=False
            )

    def granted(self, wanted: WantedSampling, prompt_tokens: int, *, evaluated: bool = False) -> SamplingParameters:
        """What a call gets of what it wants; nothing is pinned where the policy is `evaluated`. Raises `CallRefused`
        where the context has no room."""
        room = self.max_context_tokens - prompt_tokens
        if room < 1:
            raise CallRefused(
                400,
                "context_length_exceeded",
                f"This model's maximum context length is {self.max_context_tokens} tokens. However, your messages "
                f"resulted in {prompt_tokens} tokens.",
                param="messages",
            )
        if not prompt_tokens:
            raise CallRefused(400, "invalid_prompt", "the prompt is empty", param="prompt")
        own = self.evaluation if evaluated else EvaluatedSampling()
        stops = () if wanted.ignore_eos else self.sampling.stop_token_ids
        return SamplingParameters(
            max_new_tokens=min(wanted.max_tokens or room, own.max_tokens or self.sampling.max_new_tokens, room),
            noise_seed=0,
            stop_token_ids=tuple(sorted({*stops, *wanted.stop_token_ids})),
            temperature=self._temperature(wanted, evaluated=evaluated),
            top_p=self.top_p(evaluated=evaluated),
        )

    def _temperature(self, wanted: WantedSampling, *, evaluated: bool) -> float:
        if evaluated and self.evaluation.temperature is not None:
            return self.evaluation.temperature
        temperature = wanted.temperature
        if temperature is None or ("temperature" in self.pinned and not evaluated):
            return self.sampling.temperature
        if evaluated and temperature == 0:
            return temperature
        if not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX:
            allowed = f"from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}"
            found = f"temperature is {temperature}; allowed, as its tokens are trained on: {allowed}"
            raise CallRefused(400, "invalid_temperature", found, param="temperature")
        return temperature

    def top_p(self, *, evaluated: bool) -> float:
        """The share of probability that turns are drawn from: all of it, but for evaluations that say otherwise."""
        own = self.evaluation.top_p
        return own if evaluated and own is not None else 1.0

    def check_ids(self, ids: bytes) -> None:
        """Raises `CallRefused` for what is no packed list of ids of the vocabulary."""
        if len(ids) % TOKEN_BYTES:
            raise CallRefused(400, "invalid_prompt", "the prompt is no list of token ids", param="prompt")
        view = memoryview(ids).cast("i")
        if len(view) and not 0 <= min(view) <= max(view) < self.vocab_size:
            found = f"token ids are from 0 to {self.vocab_size - 1}"
            raise CallRefused(400, "invalid_prompt", found, param="prompt")
