"""What measured bits and coding rates come to for models that do not fit this machine. Nothing here is measured.

Bytes and coding times are those of the measured update, element for element; each rank of trainer and worker codes
its own shard on one core. The time is that of the slowest stage, and of the others for one bucket, as stages overlap
bucket by bucket. Latency of relays, contention of links and what GPUs take to hand over weights are left out.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks._common import PRINTED, Figures
from elastic.weights.choice import BYTES_PER_S_IN_GBPS

MODELS = {"Qwen3-8B": 8.19e9, "Qwen3-32B": 32.8e9}
"""Elements."""

RATES_GBPS = (1, 5, 20, 200)
RANKS = 8
BUCKET_ELEMENTS = 32 << 20
CODECS = ("exponent_class", "gap8", "gap8_zstd")


def extrapolated(changed: Mapping[str, Any], memcpy_bytes_per_s: float) -> Figures:
    """For every model, measured share and rate the codec that is fastest, and its stages alone."""
    return {
        "measured": "bits per changed element, changed share, coding speed over memcpy on one core, memcpy",
        "computed": f"everything below: scaled to the model's elements, {RANKS} ranks a side with one core each",
        "memcpy_bytes_per_s": memcpy_bytes_per_s,
        "models": {
            model: {
                share: {
                    str(rate): _best(figures, model, rate, memcpy_bytes_per_s)
                    | {"rose_s": PRINTED["rose"]["seconds"].get(model, {}).get(str(rate)) if share == "0.01" else None}
                    for rate in RATES_GBPS
                }
                for share, figures in changed.items()
                if figures is not None and share in ("0.01", "0.05")
            }
            for model in MODELS
        },
    }


def _best(figures: Mapping[str, Any], model: str, rate_gbps: int, memcpy_bytes_per_s: float) -> Figures:
    """The fastest codec's figures."""
    changed = figures["fraction"] * MODELS[model]
    rows = [_timed(name, figures["codecs"][name], model, changed, rate_gbps, memcpy_bytes_per_s) for name in CODECS]
    best = min(rows, key=lambda row: row["total_s"])
    coo = _timed("coo", figures["codecs"]["coo"], model, changed, rate_gbps, memcpy_bytes_per_s)
    full_wire_s = 2 * MODELS[model] / (rate_gbps * BYTES_PER_S_IN_GBPS)
    return best | {"coo_s": coo["total_s"], "full_wire_s": full_wire_s}


def _timed(
    codec: str, measured: Mapping[str, float], model: str, changed: float, rate_gbps: int, memcpy_bytes_per_s: float
) -> Figures:
    size_bytes = measured["bits"] / 8 * changed
    copy_s = 2 * MODELS[model] / memcpy_bytes_per_s / RANKS
    wire_s = size_bytes / (rate_gbps * BYTES_PER_S_IN_GBPS)
    encode_s = copy_s / measured["encode_over_memcpy"]
    decode_s = copy_s / measured["decode_apply_over_memcpy"]
    stages = sorted((wire_s, encode_s, decode_s))
    buckets = MODELS[model] / RANKS / BUCKET_ELEMENTS
    return {
        "codec": codec,
        "bytes": size_bytes,
        "encode_s": encode_s,
        "wire_s": wire_s,
        "decode_apply_s": decode_s,
        "total_s": stages[2] + (stages[0] + stages[1]) / buckets,
    }
