"""States of a script leave their device in place: bits, references and shared tensors stay."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.pool.phases import PhaseError
from elastic.pool.phases.states import StateArena
from tests.seeds import examples

OPTIMISERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class Tied(nn.Module):
    """A head that is the embedding, a buffer, and a parameter that is a view of another's storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): bits(each) for key, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, list | tuple) else value


def snapshot(model: nn.Module, optimiser: torch.optim.Optimizer) -> Any:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return bits(
        [
            [parameter for _, parameter in sorted(model.named_parameters())],
            [buffer for _, buffer in sorted(model.named_buffers())],
            gradients,
            [dict(optimiser.state[each]) for each in model.parameters() if each in optimiser.state],
        ]
    )


def spoil(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Others use the arena."""
    held = [*model.parameters(), *model.buffers()]
    held += [each.grad for each in model.parameters() if each.grad is not None]
    held += [each for state in optimiser.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    for tensor in held:
        if tensor.untyped_storage().nbytes():
            tensor.detach().contiguous().view(-1).view(torch.uint8).fill_(0xA5)


def step(model: nn.Module, optimiser: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 7, (4, 3), generator=torch.manual_seed(seed))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimiser.step()
    if seed % 2:
        optimiser.zero_grad()


@settings(deadline=None, max_examples=examples(5, 40))
@given(st.sampled_from(OPTIMISERS), st.integers(1, 90), st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_steps_with_parking_between_them_are_those_without(
    kind: type[torch.optim.Optimizer], width: int, plan: list[int]
) -> None:
    torch.manual_seed(width)
    model = Tied(width)
    alone = copy.deepcopy(model)
    optimiser, other = kind(model.parameters(), lr=0.1), kind(alone.parameters(), lr=0.1)  # type: ignore[call-arg]
    held = dict(model.named_parameters())
    arena = StateArena()
    arena.learn([model, optimiser], "phase 'train'")
    for seed, times in enumerate(plan):
        step(model, optimiser, seed)
        step(alone, other, seed)
        before = snapshot(model, optimiser)
        for _ in range(times):
            arena.park()
            spoil(model, optimiser)
            arena.resume([model])
            arena.park()
            spoil(model, optimiser)
            arena.resume([model, optimiser])
            assert snapshot(model, optimiser) == before
    assert snapshot(model, optimiser) == snapshot(alone, other)
    assert model.head.weight is model.embedding.weight
    assert all(parameter is held[name] for name, parameter in model.named_parameters())


def test_a_tensor_of_two_states_comes_back_with_either() -> None:
    model = Tied(8)
    wrapper = nn.Sequential(model, nn.Linear(7, 7))
    optimiser = torch.optim.Adam(wrapper.parameters())
    step(wrapper, optimiser, 1)
    before = snapshot(wrapper, optimiser)
    arena = StateArena()
    arena.learn([model, wrapper, optimiser], "phase")
    for brought in ([wrapper, optimiser], [optimiser, wrapper, model]):
        arena.park()
        spoil(wrapper, optimiser)
        arena.resume(brought)
        assert snapshot(wrapper, optimiser) == before


def test_what_is_parked_is_not_used_and_its_copies_are_free() -> None:
    model = Tied(8)
    optimiser = torch.optim.Adam(model.parameters())
    arena = StateArena()
    arena.learn([model, optimiser], "phase 'train' (update, grpo.py:3)")
    other = copy.deepcopy(model)
    arena.park()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    for use in (lambda: model(tokens), model.state_dict, optimiser.step, optimiser.state_dict):
        with pytest.raises(PhaseError, match=r"'train' \(update, grpo.py:3\).*outside of its phases"):
            use()
    other(tokens)
    arena.resume([model, optimiser])
    model(tokens)
    model.state_dict()


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake")


class Own:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def park(self) -> None:
        self.calls.append("park")

    def resume(self) -> None:
        self.calls.append("resume")


def test_engines_sleep_and_wake_and_what_parks_by_itself_does() -> None:
    engine, own, arena = Engine(), Own(), StateArena()
    arena.learn([engine, own], "phase")
    for _ in range(2):
        arena.park()
        arena.park()
        arena.resume([engine])
        arena.resume([engine, own])
    assert engine.calls == ["sleep 1", "wake"] * 2
    assert own.calls == ["park", "resume"] * 2


def test_what_cannot_be_parked_is_named() -> None:
    class Late:
        async def sleep(self) -> None: ...

        async def wake_up(self) -> None: ...

    arena = StateArena()
    with pytest.raises(
        PhaseError, match=r"phase 'rollout': state\[1\], a dict, cannot be parked; allowed: a torch module"
    ):
        arena.learn([Own(), {}], "phase 'rollout'")
    arena.learn([Late()], "phase 'rollout'")
    with pytest.raises(PhaseError, match=r"a Late, parks asynchronously \(sleep\)"):
        arena.park()
