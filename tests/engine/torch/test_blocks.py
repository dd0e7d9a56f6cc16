import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from elastic.engine.torch.blocks import BlockPool, chain_digest, root_digest
from tests.seeds import examples

SIZE = 3


def chain(version: int, tokens: list[int]) -> list[bytes]:
    digests, parent = [], root_digest(version)
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = chain_digest(parent, tokens[at : at + SIZE])
        digests.append(parent)
    return digests


def test_a_chain_begins_with_the_version_and_whose_it_is():
    roots = {root_digest(version, key) for version in (1, 11) for key in ("", "1", "ab", "cd")}
    assert len(roots) == 8
    assert root_digest(1) in roots


class Pool(RuleBasedStateMachine):
    """Sequences over a tiny vocabulary come and go; what each block holds is remembered beside the pool."""

    alive = Bundle("alive")

    @initialize(total=st.integers(1, 12))
    def start(self, total):
        self.pool = BlockPool(total)
        self.content: dict[int, tuple] = {}
        self.users: dict[int, int] = dict.fromkeys(range(total), 0)
        self.version = 0

    @rule(target=alive, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, tokens):
        digests = chain(self.version, tokens)
        shared = self.pool.share(digests)
        for index, block in enumerate(shared):
            assert self.content[block] == (self.version, *tokens[: (index + 1) * SIZE])
        missing = -(-len(tokens) // SIZE) - len(shared)
        if missing > self.pool.available:
            with pytest.raises(ValueError, match="available"):
                self.pool.allocate(missing)
            self.pool.release(shared)
            return multiple()
        fresh = self.pool.allocate(missing)
        assert not any(self.users[block] for block in fresh), "a block of one sequence was given to another"
        blocks = shared + fresh
        for block in blocks:
            self.users[block] += 1
        for index, block in enumerate(blocks):
            if block in fresh:
                self.content[block] = (self.version, *tokens[: (index + 1) * SIZE])
        for block, digest in zip(blocks, digests, strict=False):
            self.pool.register(block, digest)
        return blocks

    @rule(blocks=consumes(alive))
    def end(self, blocks):
        self.pool.release(blocks)
        for block in blocks:
            self.users[block] -= 1

    @rule()
    def new_version(self):
        self.version += 1
        self.pool.forget()

    @invariant()
    def sound(self):
        self.pool.check()
        assert self.pool.used == sum(count > 0 for count in self.users.values())
        assert self.pool.used + self.pool.available == self.pool.total


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=examples(12, 60), stateful_step_count=30, deadline=None)


def test_the_least_recently_used_is_forgotten_first_and_tails_before_their_beginnings():
    pool = BlockPool(4)
    old, new = chain(1, [0] * 2 * SIZE), chain(1, [1] * 2 * SIZE)
    for digests in (old, new):
        blocks = pool.allocate(2)
        for block, digest in zip(blocks, digests, strict=True):
            pool.register(block, digest)
        pool.release(blocks)
    pool.allocate(1)
    assert len(pool.share(old)) == 1
    assert len(pool.share(new)) == 2
