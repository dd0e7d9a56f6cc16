"""What is on the wire: bytes that stay what they are."""

import numpy as np
import pytest

from elastic.weights.bucket import Bucket, encode_bucket
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.sums import apply_update, tile_sums


def golden_weights(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small steps, a few leaps, a long gap, and no chance in it."""
    numbers = np.arange(420)
    old = (0x3C00 + numbers * 37 % 0x0300 + 0x8000 * (numbers % 2)).astype(np.uint16)
    new = old.copy()
    new[5:100:7] += 1
    new[6:100:11] -= 2
    new[50], new[380], new[419] = 0x7FC0, 0x8000, old[419] + 300
    ends = np.array([64, 400, 420])
    if name in ("dense", "raw"):
        return old[:20], new[:20], np.array([7, 20])
    return old, new, ends


GOLDEN = {
    "dense": (
        "0b00000093a564656e73650092173a28b52ffd200e7100003cbc3cbc3cbc3c00254a6f94badc28b52ffd201ad10000bd3dbd3dbd"
        "3dbd3ebe3ebe3ebe03284d7297bde1062b50739ac00000000000000000"
    ),
    "exponent_class": (
        "1700000093ae6578706f6e656e745f636c617373cd015693254969a8150000000004bdd8bdc93ad8d1a9a9000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000a90500000000f169"
        "000000dd000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "dd04000000f1030000f11c00d1d1bd0000000000000000000000000000000000000000000000bd68d1d100bd0000000000000000"
        "00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "000000000000000000000000000000000000000000000000000000000000000000000000000000bd03dd00dd03dd00dd030000f1"
        "04000000f10401030204000000000000007d0307030503020a059b83ef01aa1a330119d3b108664c662e02000301030000000000"
        "00007d0a080c08026607616e460171f14501b52324007f5b24000000000001000000000000007d0301179b190600dc1f0c000000"
        "0100000001000000000000000000"
    ),
    "gap8": (
        "0b00000093a46761703800932139400e0e0105000504010601040500060203060103000201000301020001ff00000a85090a0104"
        "03020600050401ff1c0003010002010300ffd97901010113ff57020000000000000000"
    ),
    "gap8_zstd": (
        "1000000093a9676170385f7a73746400932a4b5b28b52ffd20210901000e0e010500050401060104050006020306010300020100"
        "0301020001ff00000a8528b52ffd2018c10000090a010403020600050401ff1c0003010002010300ffd97928b52ffd2007390000"
        "01010113ff57020000000000000000"
    ),
    "raw": (
        "0900000093a372617700920e28003c25bc4a3c6fbc943cbabcdc3c03bd283d4dbd723d97bdbd3de1bd063e2bbe503e73be9a3ec0"
        "be0000000000000000"
    ),
}
ENCODED_ALIKE = ("exponent_class", "gap8", "raw")
"""Whereas zstd's versions need not write the same."""


@pytest.mark.parametrize("name", sorted(CODECS))
def test_bytes_that_were_written_once_are_read_for_ever(name: str):
    old, new, ends = golden_weights(name)
    blob = bytes.fromhex(GOLDEN[name])
    result = old.copy()
    apply_update(Bucket(blob).decode(old, ends), result)
    assert np.array_equal(result, new)
    if name in ENCODED_ALIKE:
        assert b"".join(encode_bucket(name, CODECS[name].encode(old, new, ends))).hex() == GOLDEN[name]


def test_sums_stay_what_they_are():
    _, new, ends = golden_weights("gap8")
    assert tile_sums(new, ends).tolist() == [16692853572249693174, 4809279284869892442, 7267061901426093869]
