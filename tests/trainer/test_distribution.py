"""Log-probabilities and entropy by chunks are those of the whole matrix of logits, and so are their gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.trainer.distribution import Head, token_distribution

TOKENS, HIDDEN, VOCABULARY = 21, 6, 11


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@given(
    seed=st.integers(0, 2**31 - 5),
    chunk_elements=st.sampled_from([1, 17 * VOCABULARY, 1 << 20]),
    temperatures=st.one_of(st.floats(0.2, 3.0), st.just(None)),
    softcap=st.sampled_from([0.0, 2.0]),
    scale=st.sampled_from([1.0, 0.25]),
    biased=st.booleans(),
)
def test_it_is_that_of_all_logits(
    seed: int, chunk_elements: int, temperatures: float | None, softcap: float, scale: float, biased: bool
) -> None:
    hidden, weight = drawn(seed, TOKENS, HIDDEN), drawn(seed + 1, VOCABULARY, HIDDEN)
    bias = drawn(seed + 2, VOCABULARY) if biased else None
    token_ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    temperature = temperatures or drawn(seed + 3, TOKENS, 1).abs() + 0.5
    upstream, of_entropy = drawn(seed + 4, TOKENS), drawn(seed + 5, TOKENS)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    for tensor in inputs:
        tensor.requires_grad_()

    found = token_distribution(hidden, Head(weight, bias, softcap, scale), token_ids, temperature, chunk_elements)
    gradients = torch.autograd.grad((found.logprobs * upstream).sum(), inputs, retain_graph=True)

    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(found.logprobs, expected.log_prob(token_ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, expected.entropy(), atol=1e-5, rtol=1e-5)
    entropy_gradients = torch.autograd.grad((found.logprobs * upstream + found.entropy * of_entropy).sum(), inputs)
    objective = (expected.log_prob(token_ids) * upstream).sum()
    references = torch.autograd.grad(objective, inputs, retain_graph=True)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)
    references = torch.autograd.grad(objective + (expected.entropy() * of_entropy).sum(), inputs)
    for gradient, reference in zip(entropy_gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)


def test_no_tokens_have_no_gradient() -> None:
    hidden, weight = drawn(0, 0, HIDDEN).requires_grad_(), drawn(1, VOCABULARY, HIDDEN).requires_grad_()
    found = token_distribution(hidden, Head(weight), torch.zeros(0, dtype=torch.int64), 1.0)
    of_weight = torch.autograd.grad(found.logprobs.sum(), weight)[0]
    assert found.logprobs.shape == (0,)
    assert not of_weight.any()


@pytest.mark.parametrize("vocabulary", [1000])
def test_in_bfloat16_it_is_computed_in_float32(vocabulary: int) -> None:
    hidden, weight = drawn(0, TOKENS, 32).bfloat16(), (0.1 * drawn(1, vocabulary, 32)).bfloat16()
    token_ids = torch.arange(TOKENS)
    found = token_distribution(hidden.requires_grad_(), Head(weight.requires_grad_()), token_ids, 1.0)
    expected = torch.distributions.Categorical(logits=(hidden @ weight.T).float())
    torch.testing.assert_close(found.logprobs, expected.log_prob(token_ids), atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(found.logprobs.sum(), (hidden, weight))
    references = torch.autograd.grad(expected.log_prob(token_ids).sum(), (hidden, weight))
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, reference, atol=0.05, rtol=0.05)
