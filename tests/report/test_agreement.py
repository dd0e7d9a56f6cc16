"""Figures of steps by provider and engine, as one run's."""

import pytest

from elastic.report.agreement import source_words, sources_of


def figures(source: str, tokens: float, mean: float, most: float, masked: float = 0.0) -> dict[str, float | None]:
    return {
        f"tokens_seen/{source}": tokens,
        f"log_ratio_mean/{source}": mean,
        f"log_ratio_max/{source}": most,
        f"mismatch_kl/{source}": mean / 2,
        f"masked_fraction/{source}": masked,
        f"clip_fraction/{source}": None,
    }


def test_steps_weigh_by_their_tokens_and_the_farthest_source_comes_first():
    steps = [
        {**figures("reserved/embedded", 100, 0.01, 0.1), "tokens_seen": 100.0, "loss": 0.1},
        {**figures("reserved/embedded", 300, 0.03, 0.05), **figures("spot/vllm", 50, 2.0, 9.0, masked=0.5)},
        {"loss": None, **figures("gone/vllm", 0, 7.0, 7.0)},
    ]
    far, near = sources_of(steps)
    assert (far.source, far.tokens, far.log_ratio_max, far.masked_fraction) == ("spot/vllm", 50, 9.0, 0.5)
    assert (near.source, near.tokens, near.log_ratio_max) == ("reserved/embedded", 400, 0.1)
    assert near.log_ratio_mean == pytest.approx(0.025)
    assert near.mismatch_kl == pytest.approx(0.0125)
    assert source_words(far).startswith("spot/vllm: log-probabilities 2 nats from the trainer's (at most 9)")
    assert sources_of([]) == []
