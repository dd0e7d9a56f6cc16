"""Phases of a Transformers `Trainer` (such as TRL's `GRPOTrainer`), through a callback:

    GRPOTrainer(..., callbacks=[ElasticCallback()])

The callback watches the model. A forward pass without gradients belongs to the rollout phase, one with gradients to the
training phase; each phase lasts until the other begins. If another engine generates (vLLM), use a phases file.
"""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elastic.pool.phases import ScriptPhase, steps_done


class ElasticCallback(TrainerCallback):
    """Enters phases by what the model is used for. It has an effect in a pool only.

    The training phase holds its node until the script ends, so that the script can save the model.
    """

    def __init__(self) -> None:
        self._rollout = ScriptPhase("rollout", (), both=False, name="forward without gradients")
        self._train = ScriptPhase("train", (), both=False, name="forward with gradients")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        rollout, train = self._rollout.of([model]), self._train.of([model, optimizer])

        def used(*_: Any) -> None:
            (train if torch.is_grad_enabled() else rollout).begin(lingers=True)

        model.register_forward_pre_hook(used)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        steps_done(state.global_step)
