"""The worker's side: a version's weights off a relay, verified, or an error and nothing else."""

import time
from collections.abc import Iterator

import torch
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential
from torch import Tensor

from elastic.weights.errors import RelayUnavailable, WeightsCorrupted
from elastic.weights.manifest import Manifest, decode_manifest, manifest_key, new_checksum
from elastic.weights.relay import Relay

BUCKET_BYTES = 8 << 20
"""What a broken transfer has to fetch again, and how often the deadline is looked at."""

_DTYPES = {"bfloat16": torch.bfloat16}


def pull(
    relay: Relay, version: int, *, timeout_s: float = 30.0, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest of `version` and its tensors on the CPU, bit for bit as published. Blocks the caller's thread.

    A broken transfer goes on with the bucket that broke, until `timeout_s` is over.
    Raises `WeightsCorrupted` for anything that is not what its manifest says, else the last `RelayError`.
    """
    deadline_s = time.monotonic() + timeout_s
    manifest = decode_manifest(_get(relay, manifest_key(version), 0, None, deadline_s))
    if manifest.version != version:
        raise WeightsCorrupted(f"manifest of version {version}: it is that of version {manifest.version}")
    blob = _pull_blob(relay, manifest, deadline_s, bucket_bytes)
    return manifest, dict(_tensors(manifest, blob))


def _pull_blob(relay: Relay, manifest: Manifest, deadline_s: float, bucket_bytes: int) -> Tensor:
    blob = torch.empty(manifest.blob_bytes, dtype=torch.uint8)
    memory = blob.numpy().data
    checksum = new_checksum()
    for start in range(0, manifest.blob_bytes, bucket_bytes):
        bucket = memory[start : start + bucket_bytes]
        content = _get(relay, manifest.blob, start, len(bucket), deadline_s)
        if len(content) != len(bucket):
            found = start + len(content)
            raise WeightsCorrupted(f"{manifest.blob}: ends at byte {found}; its manifest says {manifest.blob_bytes}")
        bucket[:] = content
        checksum.update(content)
    if checksum.hexdigest() != manifest.blob_checksum:
        raise WeightsCorrupted(f"{manifest.blob}: its checksum is not the manifest's")
    return blob


def _get(relay: Relay, key: str, start: int, length: int | None, deadline_s: float) -> bytes:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise RelayUnavailable(f"{key}: not pulled in time; stopped at byte {start}")
    attempts = Retrying(
        retry=retry_if_exception_type(RelayUnavailable),
        stop=stop_after_delay(remaining_s),
        wait=wait_exponential(multiplier=0.05, max=1.0),
        reraise=True,
    )
    return attempts(relay.get, key, start, length)


def _tensors(manifest: Manifest, blob: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views into `blob`, which lives as long as one of them does."""
    for entry in manifest.tensors:
        elements = blob[entry.offset : entry.offset + entry.size_bytes].view(_DTYPES[entry.dtype])
        yield entry.name, elements.view(entry.shape)
