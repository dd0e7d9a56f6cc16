"""What can go wrong between a trainer's weights and a worker's.

WeightsError
├── RelayError              a relay refused, or could not be reached
│   ├── InvalidKey
│   ├── BlobNotFound
│   ├── BlobConflict        the key holds other content already
│   └── RelayUnavailable    asking again may help
└── WeightsCorrupted        a manifest or blob is not what was published
    └── WeightsForged       the run's trainer did not sign it, or signed it as something else
"""

from typing import NamedTuple


class WeightsRefusal(NamedTuple):
    """An object that did not verify, and why. Another object replaces it, in the end a keyframe."""

    what: str
    reason: str


class WeightsError(Exception):
    refused: tuple[WeightsRefusal, ...] = ()
    """Objects that the pull had refused before it gave up."""


class RelayError(WeightsError):
    """The message names the relay's place (path or URL) and the cause."""


class InvalidKey(RelayError):
    pass


class BlobNotFound(RelayError):
    pass


class BlobConflict(RelayError):
    pass


class RelayUnavailable(RelayError):
    pass


class WeightsCorrupted(WeightsError):
    """Weights did not verify, and are never served. The message says what was found and what was expected."""


class WeightsForged(WeightsCorrupted):
    """Says nothing of the weights that it was to be put over."""


class VersionSuperseded(Exception):
    """Another version has been staged since, or is being staged: nothing was done."""
