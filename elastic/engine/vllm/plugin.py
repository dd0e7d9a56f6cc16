"""vLLM's plugin: names the weight-transfer backend `elastic`.

vLLM loads it before it looks for kernels in all that is imported, and fails there on the library by which signatures
are checked. So nothing of Elastic is imported here.
"""

# pyright: reportMissingImports=false

import contextlib


def register() -> None:
    """vLLM's plugin: it is called in each of its processes, and may be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine("elastic", "elastic.engine.vllm.transfer", "RelayTransfer")
