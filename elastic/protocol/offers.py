"""What somebody else's trainer offers to a run: a directory of weights, as the core journals it and its importer reads.

The text is opaque to the core. The offering side makes it, with a mark of the directory's content.
"""

import os
from hashlib import blake2b
from pathlib import Path

import msgspec

WEIGHTS = "*.safetensors*"
"""The files of a directory that count when it is asked whether it has changed: weights, and their index."""


class OfferedWeights(msgspec.Struct, frozen=True):
    """A Hugging Face directory. `lasting`: its files are never written again, so that they may be kept by links.

    `look` is the directory's as it was offered: if it has another one it was written again. Empty is not compared.
    """

    directory: str
    lasting: bool = False
    look: str = ""


_decoder = msgspec.json.Decoder(OfferedWeights)


def source_of_offer(offered: OfferedWeights) -> str:
    return msgspec.json.encode(offered).decode()


def read_source(source: str) -> OfferedWeights:
    """Raises `ValueError` for what is no offer."""
    return _decoder.decode(source)


def look_of(directory: Path) -> str:
    """What is the same as long as a directory's weights are not written again: a digest of its path, and of the inode,
    size and time of each of their files. Raises `OSError`."""
    parts = [str(directory)]
    for path in sorted(directory.glob(WEIGHTS)):
        found = os.stat(path)
        parts += [path.name, str(found.st_ino), str(found.st_size), str(found.st_mtime_ns)]
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
