import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.torch.sampling import gumbel_noise, sample, signed_seed

seeds = st.integers(0, 2**64 - 1)


def splitmix64(x: int) -> int:
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(seeds, st.integers(0, 10_000), st.integers(0, 50))
def test_noise_is_the_documented_function(seed, position, token):
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    bits = splitmix64((splitmix64((seed + (position + 1) * golden) & mask) + (token + 1) * golden) & mask)
    uniform = torch.tensor(((bits >> 12) + 0.5) * 2.0**-52, dtype=torch.float64)
    found = gumbel_noise(torch.tensor([signed_seed(seed)]), torch.tensor([position]), token + 1)[0, token]
    torch.testing.assert_close(found, -(-uniform.log()).log())


@given(seeds, st.lists(seeds, max_size=9), st.integers(0, 500))
def test_a_row_does_not_depend_on_its_companions(seed, others, position):
    logits = torch.linspace(-2, 2, 25).repeat(len(others) + 1, 1)
    rows = torch.tensor([signed_seed(s) for s in [*others, seed]])
    temperatures = torch.full((len(rows),), 0.8)
    positions = torch.full((len(rows),), position)
    token, logprob = (t[-1] for t in sample(logits, temperatures, rows, positions))
    token_alone, logprob_alone = (t[0] for t in sample(logits[:1], temperatures[:1], rows[-1:], positions[:1]))
    assert token == token_alone
    assert logprob == logprob_alone


def test_samples_follow_the_distribution():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    count = 40_000
    positions = torch.arange(count) % 200
    rows = (torch.arange(count) // 200) * 12345
    tokens, logprobs = sample(logits.repeat(count, 1), torch.full((count,), 1.5), rows, positions)
    expected = (logits / 1.5).softmax(-1)
    found = torch.bincount(tokens, minlength=5) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() <= 5 * error).all()
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_noise_is_standard_gumbel_and_uncorrelated():
    noise = gumbel_noise(torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64), 32).view(64, 64, 32)
    assert abs(noise.mean() - 0.57722) < 0.02
    assert abs(noise.var() - 1.64493) < 0.05
    centred = noise - noise.mean()
    for neighbours in (
        centred[1:] * centred[:-1],
        centred[:, 1:] * centred[:, :-1],
        centred[..., 1:] * centred[..., :-1],
    ):
        assert neighbours.mean().abs() < 0.03
