"""Natural numbers in seven bits a byte, least first."""

# pyright: reportMissingImports=false
from numba import njit

BYTES_MAX = 5


@njit(inline="always")
def put_varint(data, at, value):  # type: ignore[no-untyped-def]
    """Write `value` at `data[at]`; returns where it ends."""
    while value >= 0x80:
        data[at] = (value & 0x7F) | 0x80
        value >>= 7
        at += 1
    data[at] = value
    return at + 1


@njit(inline="always")
def take_varint(data, at, end):  # type: ignore[no-untyped-def]
    """(the number at `data[at]`, where it ends); the end is beyond `end` if it is cut short or too long."""
    value = 0
    for place in range(BYTES_MAX):
        if at + place >= end:
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return 0, end + 1
