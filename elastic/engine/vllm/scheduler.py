"""vLLM's scheduler for an engine that serves users and generates rollouts as well.

Requests of priority 0 and less are serving's, all others rollouts. `vllm serve` takes it, too:

    --scheduling-policy priority --no-async-scheduling --scheduler-cls elastic.engine.vllm.scheduler.ServingFirst
    --additional-config '{"rollout_kv_share": 0.5}'
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import time
from math import ceil
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from elastic.engine.vllm.sharing import SharingRequest, decide

SHARE = "rollout_kv_share"
"""The key of vLLM's `additional_config` under which the rollouts' share of KV blocks stands."""
DEFAULT_SHARE = 0.5


class ServingFirst(Scheduler):
    """vLLM's scheduler; rollouts make room for serving before each iteration (`elastic.engine.vllm.sharing`)."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        share = (self.vllm_config.additional_config or {}).get(SHARE, DEFAULT_SHARE)
        if not (isinstance(share, int | float) and 0 < share <= 1):
            raise ValueError(f"{SHARE}: {share!r}; allowed: a number above 0, at most 1")
        self._rollout_blocks = int(share * self.cache_config.num_gpu_blocks)

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        found = decide(
            [self._seen(request, request.num_tokens) for request in self.running],
            [self._seen(request, request.num_tokens + 1) for request in self.waiting],
            free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            rollout_blocks=self._rollout_blocks,
            places=self.max_num_running_reqs,
        )
        for name in found.preempted:
            request = self.requests[name]
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # A chunk of a rollout's prompt must not take an iteration's tokens from serving.
        self.running.sort(key=lambda request: request.priority > 0)
        withheld = [self.requests[name] for name in found.withheld]
        self.waiting.remove_requests(withheld)
        try:
            return super().schedule(*arguments, **named)
        finally:
            for request in withheld:
                self.waiting.add_request(request)

    def _seen(self, request: Any, tokens: int) -> SharingRequest:
        return SharingRequest(request.request_id, request.priority > 0, ceil(tokens / self.block_size))
