"""Routes by which weights, or a device's memory, would go another way than by a directory, and what to set instead."""

from collections.abc import Mapping
from typing import NamedTuple

from starlette.responses import Response

from elastic.front.doors.calls import DoorCall, DoorRoute, result_refused
from elastic.protocol.openai.errors import FrontError

_PRIME_RL = "set prime-rl's [weight_broadcast] type = 'filesystem'"
_TRL = (
    "give TRL's AsyncGRPOTrainer weight_transfer=elastic.integrations.trl.ElasticWeights(…); its GRPOTrainer in server "
    "mode knows no other way"
)
_SKYRL = "train a LoRA adapter with SkyRL (trainer.policy.model.lora.rank above 0)"
_SLIME = "set slime's --update-weight-mode full --update-weight-transport disk"
_AREAL = "set AReaL's actor.weight_update_mode: disk"
_BY_GROUP = "no weights are taken by NCCL, of which workers that come and go can have no group"
_DELTAS = "no deltas are taken: workers get those that the run makes itself of whole checkpoints"
_ENGINES = "engines are the run's own, and keep their memory"
_EXPERTS = "which experts a token went to is not told"

_VLLM: Mapping[str, str] = {
    "/init_weight_transfer_engine": f"{_BY_GROUP}; {_TRL}; or {_SKYRL}",
    "/init_communicator/": f"{_BY_GROUP}; {_TRL}",
    "/start_weight_update": f"{_BY_GROUP}; {_TRL}; or {_SKYRL}",
    "/finish_weight_update": f"{_BY_GROUP}; {_TRL}; or {_SKYRL}",
    "/init_broadcaster": f"{_BY_GROUP}; {_PRIME_RL}",
    "/collective_rpc": f"{_BY_GROUP}; {_SKYRL}",
    "/fetch_weights": f"{_DELTAS}; {_SKYRL}",
    "/skyrl/v1/generate": f"{_EXPERTS}; set generator.inference_engine.enable_return_routed_experts=false",
    "/sleep": f"{_ENGINES}; set SkyRL's trainer.placement.colocate_all=false",
    "/wake_up": f"{_ENGINES}; set SkyRL's trainer.placement.colocate_all=false",
}
_SGLANG: Mapping[str, str] = {
    "/init_weights_update_group": f"{_BY_GROUP}; {_SLIME}; or {_AREAL}",
    "/destroy_weights_update_group": f"{_BY_GROUP}; {_SLIME}; or {_AREAL}",
    "/update_weights_from_distributed": f"{_BY_GROUP}; {_SLIME}; or {_AREAL}",
    "/update_weights_from_tensor": f"{_BY_GROUP}; {_SLIME}; or {_AREAL}",
    "/update_weights_from_ipc": f"{_BY_GROUP}; {_SLIME}; or {_AREAL}",
    "/areal_init_weights_update_group": f"{_BY_GROUP}; {_AREAL}",
    "/areal_set_update_weight_meta": f"{_BY_GROUP}; {_AREAL}",
    "/areal_set_update_weight_meta_lora": f"{_BY_GROUP}; {_AREAL}",
    "/areal_update_weights_xccl": f"{_BY_GROUP}; {_AREAL}",
    "/areal_update_weights_lora_xccl": f"{_BY_GROUP}; {_AREAL}",
    "/pull_weights": f"{_DELTAS}; {_SLIME}, and leave out --update-weight-local-checkpoint-dir",
    "/release_memory_occupation": f"{_ENGINES}; leave out slime's --offload-rollout and --colocate",
    "/resume_memory_occupation": f"{_ENGINES}; leave out slime's --offload-rollout and --colocate",
}


class ShutRoute(NamedTuple):
    """Answers no call, for a reason."""

    reason: str
    status: int = 400

    async def __call__(self, call: DoorCall) -> Response:
        raise FrontError(self.status, self.reason, code="not_served")


REFUSED = (
    *(DoorRoute("POST", path, ShutRoute(why)) for path, why in _VLLM.items()),
    *(DoorRoute("POST", path, ShutRoute(why), result_refused) for path, why in _SGLANG.items()),
)
"""What is refused whichever doors are open, each in the shape of its protocol."""
