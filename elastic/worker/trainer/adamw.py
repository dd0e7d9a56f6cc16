"""AdamW, bit for bit as `torch.optim.AdamW` computes it.

That class imports torch's compiler, which takes a process 3 s and 100 MB; the function behind it does not.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamW:
    """Updates `parameters` in place. `exp_avg` and `exp_avg_sq` are their moments, in the same order.

    What has one dimension or none does not decay: norms and biases.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.exp_avg = [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters]
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self.begin_at(0)

    def begin_at(self, updates: int) -> None:
        """Count on from so many updates: the moments are those after them."""
        self._steps = [torch.tensor(float(updates)) for _ in self.parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        for decays in (True, False):
            places = [place for place, one in enumerate(self.parameters) if (one.ndim > 1) is decays]
            if places:
                self._step(places, gradients, learning_rate, self._weight_decay if decays else 0.0)

    def _step(
        self, places: Sequence[int], gradients: Sequence[Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        parameters, gradients, exp_avg, exp_avg_sq, steps = (
            [tensors[place] for place in places]
            for tensors in (self.parameters, gradients, self.exp_avg, self.exp_avg_sq, self._steps)
        )
        adamw(
            parameters,
            gradients,
            exp_avg,
            exp_avg_sq,
            [],
            steps,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )
