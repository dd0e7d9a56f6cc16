from torch import Tensor
from transformers import PreTrainedModel

def revert_weight_conversion(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]: ...
