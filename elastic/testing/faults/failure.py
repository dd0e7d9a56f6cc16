"""What a world says that has failed."""


class WorldFailed(AssertionError):
    """Something that must hold in a world did not; the message ends with the command that shows it again.

    `world` is one of `elastic.testing.faults.worlds.WORLDS`, and `options` are those of the command besides the seed.
    """

    def __init__(self, world: str, seed: int, found: str, options: str = "") -> None:
        self.seed = seed
        super().__init__(
            f"seed {seed}: {found}\nreplay it: elastic simulate --faults --world {world} --seed {seed}{options}"
        )
