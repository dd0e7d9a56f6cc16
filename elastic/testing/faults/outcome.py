"""What a world has come to, and what it says if it has failed."""

import msgspec


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    """What a world has seen. `history` hashes all of it, `state` what it came to; empty where a world has none.

    `incarnations` counts the processes of its orchestrators and of its pool, `followed` the versions that parked
    residents have put in force.
    """

    events: int
    faults: int
    history: str = ""
    state: str = ""
    incarnations: int = 0
    followed: int = 0


class WorldFailed(AssertionError):
    """Something that must hold in a world did not; the message ends with the command that shows it again.

    `world` is one of `elastic.testing.faults.worlds.WORLDS`, and `options` are those of the command besides the seed.
    """

    def __init__(self, world: str, seed: int, found: str, options: str = "") -> None:
        self.seed = seed
        super().__init__(
            f"seed {seed}: {found}\nreplay it: elastic simulate --faults --world {world} --seed {seed}{options}"
        )
