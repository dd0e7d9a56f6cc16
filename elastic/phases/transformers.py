"""Phases of a Transformers `Trainer`, TRL's `GRPOTrainer` among them, by a callback:

    GRPOTrainer(..., callbacks=[ElasticCallback()])

The model itself tells what it is used for: a forward pass without gradients belongs to the rollouts, one with gradients
to training, and either lasts until the other begins. What generates elsewhere (a vLLM engine) needs a phases file.
"""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elastic.phases import ScriptPhase, steps_done


class ElasticCallback(TrainerCallback):
    """Outside of a pool it does nothing. Training holds its node until the script ends, for what saves the model."""

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
