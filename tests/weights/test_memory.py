import numpy as np
import torch

from elastic.weights.memory import Memory


def address(bits: np.ndarray) -> int:
    return bits.__array_interface__["data"][0]


def test_memory_is_used_again_when_nobody_holds_it():
    memory = Memory()
    bits = memory.empty(5000)
    bits[:] = 7
    before = address(bits)
    del bits
    assert address(memory.empty(5000)) == before


def test_what_is_held_is_never_given_away():
    memory = Memory()
    bits = memory.empty(5000)
    bits[:] = 7
    tensor = torch.from_numpy(bits[1000:].view(np.int16)).view(torch.bfloat16)[10:20].view(2, 5)
    del bits
    others = [memory.empty(5000) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert (tensor.view(torch.int16) == 7).all()
    del tensor
    assert len({address(memory.empty(5000)) for _ in range(2)}) == 1


def test_other_sizes_and_nothing_at_all():
    memory = Memory()
    assert memory.empty(0).size == 0
    assert memory.empty(10).size == 10
    assert memory.empty(11).size == 11
