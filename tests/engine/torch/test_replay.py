"""A turn cut anywhere and continued elsewhere: the same tokens and log-probabilities, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.config import EngineConfig
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.engine.model.stored import parameter_shapes
from elastic.engine.torch.runner import Runner
from elastic.engine.torch.scheduler import BatchScheduler
from tests.seeds import examples

POLICY = Qwen3Config(initializer_range=0.15)
ODD = Qwen3Config(
    vocab_size=25,
    hidden_size=72,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=24,
    tie_word_embeddings=False,
)
LENGTH = 330
"""Crosses the padded context lengths 128 and 256."""


@st.composite
def environments(draw):
    """How an engine may be set up: nothing of this may show in a turn's tokens."""
    return {
        "max_batch": draw(st.integers(1, 20)),
        "prefill_chunk_tokens": draw(st.sampled_from([61, 5, 16, 1, 256, 1000])),
        "kv_block_tokens": draw(st.sampled_from([16, 4, 1, 24])),
    }


@pytest.mark.slow
@given(
    environment=environments(),
    cut=st.integers(1, 199),
    companions=st.lists(st.tuples(st.integers(1, 230), st.integers(1, 60)), max_size=8),
    found=st.integers(0, 150),
)
@settings(max_examples=examples(2, 6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_turn_continues_bit_for_bit(make_engine, turn, environment, cut, companions, found):
    """Two hundred tokens on several engines: a difference of arithmetic may show late."""
    whole = turn("whole", prompt=40, max_new_tokens=200, temperature=1.3)
    reference = make_engine()
    (tokens,) = reference.run(whole)
    logprobs = reference.logprobs("whole")
    reference.close()

    elsewhere = make_engine(**environment, kv_blocks=4096)
    context = whole.token_ids + tokens[:cut]
    if found:
        elsewhere.run(turn("found", prompt=context[:found], max_new_tokens=1))
    others = [turn(f"other {i}", prompt=prompt, max_new_tokens=new) for i, (prompt, new) in enumerate(companions)]
    moved = turn(
        "moved",
        prompt=context,
        start=cut,
        max_new_tokens=200,
        temperature=1.3,
        noise_seed=whole.sampling.noise_seed,
        recompute=True,
    )
    at = len(others) // 2
    elsewhere.run(*others[:at], moved, *others[at:])
    assert elsewhere.tokens("moved") == tokens[cut:]
    assert elsewhere.logprobs("moved") == logprobs[cut:]
    elsewhere.close()


@pytest.fixture(scope="module", params=[POLICY, ODD], ids=["policy", "odd sizes"])
def runner(request):
    torch.manual_seed(3)
    model = Qwen3(request.param)
    tensors = {name: t.bfloat16() for name, t in model.state_dict().items() if name in parameter_shapes(request.param)}
    model.load_state_dict(tensors, strict=False)
    tokens = torch.randint(0, request.param.vocab_size, (LENGTH,)).tolist()

    def make() -> Runner:
        made = Runner(request.param, torch.device("cpu"), max_context=LENGTH, kv_blocks=600, block_tokens=8)
        made.load(made.verify(tensors))
        return made

    # As in a replayable engine: several threads share one product out among themselves, and sum in another order.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make, model, tokens
    torch.set_num_threads(threads)


def _logits(runner: Runner, requests, chunk: int) -> list[torch.Tensor]:
    """Each request's logits after its last token, all prefilled together in chunks."""
    settings = {"max_batch": 64, "prefill_chunk_tokens": chunk, "kv_blocks": 600, "kv_block_tokens": 8}
    scheduler = BatchScheduler(EngineConfig.model_validate(settings))
    order = [scheduler.add(request) for request in requests]
    found = {}
    with torch.inference_mode():
        while work := scheduler.plan(admit_new=True):
            rows = iter(runner.forward(work))
            done = [item for item in work if item.samples]
            found.update({id(item.sequence): next(rows) for item in done})
            for item in work:
                scheduler.commit(item)
            for item in done:
                scheduler.remove(item.sequence)
    return [found[id(sequence)] for sequence in order]


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=8),
    chunk=st.sampled_from([100, 5, 17, 64, 256, 1000]),
    data=st.data(),
)
@settings(max_examples=examples(4, 12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_logits_do_not_depend_on_batch_or_chunks(runner, turn, lengths, chunk, data):
    make, _, tokens = runner
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    requests = [turn(f"t{i}", prompt=tokens[:length]) for i, length in enumerate(lengths)]
    alone = _logits(make(), [requests[chosen]], chunk=LENGTH)[0]
    assert torch.equal(_logits(make(), requests, chunk)[chosen], alone)


@torch.no_grad()
def test_logits_agree_with_the_training_forward(runner, turn):
    make, model, tokens = runner
    expected = model(torch.tensor([tokens]))[0]
    lengths = [1, 5, 127, 128, 129, 256, LENGTH]
    requests = [turn(f"t{length}", prompt=tokens[:length]) for length in lengths]
    for length, logits in zip(lengths, _logits(make(), requests, chunk=100), strict=True):
        assert (logits - expected[length - 1]).abs().max() < 1e-4
