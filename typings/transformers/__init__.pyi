"""What Elastic uses of transformers, whose own `__init__` has a type checker read thousands of models' files."""

from collections.abc import Callable
from os import PathLike
from typing import Any, Self

from torch import Tensor, nn

__version__: str

class PreTrainedConfig:
    @classmethod
    def for_model(cls, model_type: str, **fields: Any) -> Self: ...
    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], *, local_files_only: bool = ..., **more: Any
    ) -> Self: ...
    def get_text_config(self) -> Any: ...

class AutoConfig(PreTrainedConfig): ...

class Qwen3Config(PreTrainedConfig):
    def __init__(self, **fields: Any) -> None: ...

class PreTrainedModel(nn.Module):
    def save_pretrained(self, save_directory: str | PathLike[str]) -> None: ...

class Qwen3ForCausalLM(PreTrainedModel):
    def __init__(self, config: Qwen3Config) -> None: ...

class AutoModelForCausalLM:
    @classmethod
    def from_config(cls, config: PreTrainedConfig, **more: Any) -> Any: ...
    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], *, local_files_only: bool = ..., **more: Any
    ) -> Any: ...

class AttentionInterface:
    @classmethod
    def register(cls, key: str, value: Callable[..., tuple[Tensor, Tensor | None]]) -> None: ...

class PreTrainedTokenizerFast:
    def __init__(self, *, tokenizer_object: Any = ..., pad_token: str = ..., eos_token: str = ...) -> None: ...

class TrainingArguments: ...
class TrainerControl: ...

class TrainerState:
    global_step: int

class TrainerCallback:
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None: ...
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None: ...
