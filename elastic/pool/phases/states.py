"""States of a script that leave their device between phases, in place: references to them stay valid.

A tensor that several states share is moved once. On a machine with a GPU, tensors in host memory stay there. On a
machine without a GPU, the host is the device.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from elastic.pool.phases import PhaseError
from elastic.system.plain_values import with_article

if TYPE_CHECKING:
    from torch import Tensor

    from elastic.system.parking.tensors import ParkedTensors

WAYS = (
    ("park", "resume"),
    ("sleep", "wake_up"),
    ("sleep", "wake"),
    ("release_memory_occupation", "resume_memory_occupation"),
)
"""Pairs of methods by which objects that are not torch's leave their device and come back. The last pair is
SGLang's."""

ALLOWED = f"a torch module or optimiser, or something with {', '.join(' and '.join(way) for way in WAYS)}"

_parked_names: dict[int, str] = {}
"""The names of torch modules and optimisers that are off their device, by `id`."""


class _Movable(Protocol):
    parked: bool

    def park(self) -> None: ...

    def resume(self) -> None: ...


class StateArena:
    """Every state that a script has named. Each state is either on its device or parked."""

    def __init__(self) -> None:
        self._states: dict[int, _Movable] = {}
        self._kept: list[Any] = []
        """What is known by its `id` must live."""
        self._storages: dict[int, _Tensors] = {}
        """By address, whose copy a parked storage is in."""

    def learn(self, things: Iterable[Any], owner: str) -> None:
        """Register states of `owner`. Raises `PhaseError` for an object that cannot be parked."""
        for at, thing in enumerate(things):
            if id(thing) not in self._states:
                self._states[id(thing)] = self._movable(
                    thing, f"{owner}: state[{at}], {with_article(type(thing).__name__)},"
                )
                self._kept.append(thing)

    def park(self) -> None:
        """Take every state that is on the device off it."""
        for state in self._states.values():
            if not state.parked:
                state.park()

    def resume(self, things: Iterable[Any]) -> None:
        """Bring these states to the device, and with them all states that share tensors with them."""
        for thing in things:
            state = self._states[id(thing)]
            if isinstance(state, _Tensors):
                for owner in {self._storages.get(_address(tensor)) for tensor in state.tensors()} - {None, state}:
                    owner.resume()  # type: ignore[union-attr]
            if state.parked:
                state.resume()

    def _movable(self, thing: Any, what: str) -> _Movable:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(thing, torch.nn.Module):
            for hook in (thing.register_forward_pre_hook, thing.register_state_dict_pre_hook):
                hook(_refuse_parked)
            return _Tensors(thing, what, lambda: _of_module(thing), self._storages)
        if torch is not None and isinstance(thing, torch.optim.Optimizer):
            while isinstance(inner := getattr(thing, "optimizer", None), torch.optim.Optimizer):
                thing = inner  # Accelerate's, around torch's
            for hook in (thing.register_step_pre_hook, thing.register_state_dict_pre_hook):
                hook(_refuse_parked)
            return _Tensors(thing, what, lambda: _of_values(thing.state), self._storages)
        for leave, come in WAYS:
            if callable(getattr(thing, leave, None)) and callable(getattr(thing, come, None)):
                return _ByMethods(what, getattr(thing, leave), getattr(thing, come))
        raise PhaseError(f"{what} cannot be parked; allowed: {ALLOWED}")


class _Tensors:
    def __init__(
        self, thing: Any, what: str, tensors: "Callable[[], Iterable[Tensor]]", storages: "dict[int, _Tensors]"
    ) -> None:
        self._id, self._what = id(thing), what
        self._tensors, self._storages = tensors, storages
        self._copies: ParkedTensors | None = None
        self.parked = False

    def tensors(self) -> "Iterator[Tensor]":
        import torch

        host_only = not torch.cuda.is_available()
        for tensor in self._tensors():
            local = getattr(tensor, "_local_tensor", tensor)  # of a tensor that is spread over processes
            if host_only or local.device.type != "cpu":
                yield local

    def park(self) -> None:
        from elastic.system.parking.tensors import ParkedTensors

        self._copies = self._copies or ParkedTensors()
        mine = [tensor for tensor in self.tensors() if _address(tensor) not in self._storages]
        self._copies.park(mine)
        self._storages.update((_address(tensor), self) for tensor in mine)
        self.parked = True
        _parked_names[self._id] = self._what

    def resume(self) -> None:
        assert self._copies is not None
        self._copies.resume()
        for address in [address for address, owner in self._storages.items() if owner is self]:
            del self._storages[address]
        self.parked = False
        _parked_names.pop(self._id, None)


class _ByMethods:
    def __init__(self, what: str, leave: Callable[[], Any], come: Callable[[], Any]) -> None:
        self._what, self._leave, self._come = what, leave, come
        self.parked = False

    def park(self) -> None:
        self._call(self._leave)
        self.parked = True

    def resume(self) -> None:
        self._call(self._come)
        self.parked = False

    def _call(self, method: Callable[[], Any]) -> None:
        result = method()
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise PhaseError(f"{self._what} parks asynchronously ({method.__name__}); allowed: an ordinary method")


def _refuse_parked(thing: Any, *_: Any) -> None:
    """A hook that raises `PhaseError` when a parked object is used. Copies of the object may have the hook too."""
    if id(thing) in _parked_names:
        raise PhaseError(f"{_parked_names[id(thing)]} is used outside of its phases, where it is not on the device")


def _of_module(module: Any) -> "Iterator[Tensor]":
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def _of_values(value: Any) -> "Iterator[Tensor]":
    """Yield the tensors among values, also those within collections."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _of_values(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _of_values(each)


def _address(tensor: "Tensor") -> int:
    return tensor.untyped_storage()._cdata
