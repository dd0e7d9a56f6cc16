"""A server that speaks Modal's protocol, on this machine: the real client deploys to it, and calls what it deployed.

- Containers are local processes that run Modal's own container entrypoint on the code that was deployed. Of an image it
  takes the mounted sources; what an image would install is what this interpreter has.
- It keeps its own record of every container's start and end, and prices it: `record`.
- It injects faults: calls that fail or whose answers are torn, containers that are killed or preempted, outputs that
  get lost, slow starts.

What it lacks of Modal: GPUs (a price alone), network and file system isolation, usage above the reservation, memory
snapshots (a container starts whole), several regions, web endpoints, the input plane.
"""

from tests.clouds.modal_server.bench import Bench, bench, client_environment

__all__ = ["Bench", "bench", "client_environment"]
