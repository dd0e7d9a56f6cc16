"""zstd frames that other codecs' bytes come in."""

import zstandard

from elastic.weights.codecs.base import CodecError

LEVEL = 1
_WINDOW_BYTES_MAX = 1 << 27


def decompress(data: memoryview, size_max: int) -> bytes:
    """What a frame holds. Raises `CodecError`, also where it does not say that this is at most `size_max` bytes.

    It never takes more than twice that memory, whatever else the frame says of itself.
    """
    try:
        if zstandard.get_frame_parameters(data).content_size > size_max:
            raise CodecError(f"zstd frame does not say that it holds at most {size_max} bytes")
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).decompress(data, size_max)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd frame: {error}") from error
