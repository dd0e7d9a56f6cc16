"""The trainer's side: a version's weights onto a relay, and old versions off it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from elastic.weights.manifest import (
    DTYPE_BYTES,
    Manifest,
    TensorEntry,
    encode_manifest,
    keyframe_key,
    manifest_key,
    new_checksum,
    version_of,
)
from elastic.weights.relay import Relay

_DTYPE_NAMES = {torch.bfloat16: "bfloat16"}


def publish_keyframe(
    relay: Relay, run: str, version: int, tensors: Mapping[str, Tensor], model_config: Mapping[str, Any]
) -> Manifest:
    """Put full weights under `version`, the manifest last. Publishing the same again is harmless.

    `tensors` are bfloat16 on the CPU under their Hugging Face names, `model_config` the model's `config.json`.
    Raises `RelayError`, and `ValueError` for a tensor that is not bfloat16.
    """
    entries: list[TensorEntry] = []
    parts: list[memoryview] = []
    checksum = new_checksum()
    offset = 0
    for name, tensor in tensors.items():
        entry = TensorEntry(name=name, shape=tuple(tensor.shape), dtype=_dtype_name(name, tensor), offset=offset)
        part = _bytes_of(tensor)
        checksum.update(part)
        entries.append(entry)
        parts.append(part)
        offset += entry.size_bytes
    manifest = Manifest(
        run=run,
        version=version,
        kind="keyframe",
        model=dict(model_config),
        tensors=tuple(entries),
        blob=keyframe_key(version),
        blob_bytes=offset,
        blob_checksum=checksum.hexdigest(),
    )
    relay.put(manifest.blob, *parts)
    relay.put(manifest_key(version), encode_manifest(manifest))
    return manifest


def published_versions(relay: Relay) -> list[int]:
    """Versions that can be pulled, ascending."""
    keys = relay.list_keys("versions/")
    return sorted(version for key in keys if (version := version_of(key)) is not None and key == manifest_key(version))


def collect_garbage(relay: Relay, keep_versions: int, needed: Collection[int]) -> list[int]:
    """Delete all but the newest `keep_versions` and those in `needed`; returns the deleted versions."""
    if keep_versions < 1:
        raise ValueError(f"keep_versions: must be at least 1 (found {keep_versions})")
    published = published_versions(relay)
    kept = {*published[-keep_versions:], *needed}
    return _delete(relay, lambda version: version not in kept and version < published[-1]) if published else []


def discard_newer(relay: Relay, version: int) -> list[int]:
    """Delete what was published after `version`, complete or not; a resumed run will publish it anew."""
    return _delete(relay, lambda other: other > version)


def _delete(relay: Relay, condemned: Callable[[int], bool]) -> list[int]:
    """Manifests go first, so that whatever has one can still be pulled."""
    keys = [(version, key) for key in relay.list_keys("versions/") if (version := version_of(key)) is not None]
    doomed = sorted((version, key != manifest_key(version), key) for version, key in keys if condemned(version))
    for _, _, key in doomed:
        relay.delete(key)
    return sorted({version for version, _, _ in doomed})


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"tensor {name}: dtype {tensor.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
    return _DTYPE_NAMES[tensor.dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory where it is contiguous on the CPU, else a copy of it."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
