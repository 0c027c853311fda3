import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chunkserve.router.prefix_index import PrefixIndex
from chunkserve.router.workloads import digest_of


def chain(name: str, length: int, forks: dict[int, str] | None = None) -> tuple[bytes, ...]:
    """Digests of a prompt; from a fork's depth on it goes another way."""
    digests, way = [], name
    for depth in range(length):
        way += (forks or {}).get(depth, "") + ","  # the comma counts the depth, so no other way has this digest
        digests.append(digest_of(way))
    return tuple(digests)


def index_with(rows: int, max_entries: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_entries)
    for row in range(rows):
        index.add_replica(row)
    return index


def test_depths_of_replicas_that_hold_a_part() -> None:
    index = index_with(5)
    prompt = chain("a", 9)
    for row, depth in enumerate((9, 4, 0, 1, 8)):
        index.store(prompt[:depth], row)
    match = index.match(prompt, 0.0, 5)
    assert match.depths.tolist() == [9, 4, 0, 1, 8]
    assert match.num_common == 4  # the fourth chunk is on three of five
    index.check()


def test_of_a_very_long_chain_the_first_chunks_are_expected_and_all_are_stored() -> None:
    index = index_with(2, max_entries=5000)
    prompt = tuple(digest_of(f"{i}") for i in range(3750))
    index.expect(prompt, 0, until_s=10.0, now_s=0.0)
    assert index.match(prompt, 1.0, 2).depths.tolist() == [1024, 0]
    index.store(prompt, 0)
    assert index.match(prompt, 1.0, 2).depths.tolist() == [3750, 0]
    index.check()


def test_an_expected_chain_counts_until_its_time() -> None:
    index = index_with(2)
    prompt = chain("a", 3)
    index.expect(prompt, 1, until_s=10.0, now_s=0.0)
    assert index.match(prompt, 9.9, 2).depths.tolist() == [0, 3]
    assert index.match(prompt, 10.1, 2).depths.tolist() == [0, 0]


def test_a_stale_belief_does_not_come_back_with_a_new_one() -> None:
    index = index_with(2)
    prompt = chain("a", 3)
    index.expect(prompt, 0, until_s=1.0, now_s=0.0)
    index.expect(prompt, 1, until_s=10.0, now_s=5.0)
    assert index.match(prompt, 6.0, 2).depths.tolist() == [0, 3]


def test_clearing_a_replica_empties_it_at_once_and_leaves_the_others() -> None:
    index = index_with(3)
    prompt = chain("a", 50)
    for row in range(3):
        index.store(prompt, row)
    index.clear_replica(1)
    assert index.match(prompt, 0.0, 3).depths.tolist() == [50, 0, 50]
    index.store(prompt[:7], 1)
    assert index.match(prompt, 0.0, 3).depths.tolist() == [50, 7, 50]
    index.check()


def test_bits_of_dead_replicas_serve_again_and_carry_nothing_over() -> None:
    index = index_with(2, max_entries=200)
    prompt = chain("old", 10)
    for round_ in range(300):
        index.store(prompt, 0)
        index.clear_replica(0)
        index.store(chain(f"new {round_}", 20), 1)
        assert index.match(prompt, 0.0, 2).depths[0] == 0
    assert index._num_bits < 60
    index.check()


def test_eviction_takes_tails_before_heads() -> None:
    index = index_with(1, max_entries=100)
    kept = chain("kept", 40)
    index.store(kept, 0)
    for number in range(20):
        index.match(kept[:20], 0.0, 1)
        index.store(chain(f"other {number}", 10), 0)
    depth = int(index.match(kept, 0.0, 1).depths[0])
    assert depth >= 20, "the head is in use"
    assert len(index) <= 100
    assert index.num_evictions > 0
    index.check()


def test_a_chain_longer_than_the_index_keeps_its_head() -> None:
    index = index_with(1, max_entries=10)
    prompt = chain("long", 50)
    index.store(prompt, 0)
    assert index.match(prompt, 0.0, 1).depths.tolist() == [10]
    index.check()


def test_a_chain_without_its_head_is_not_taken() -> None:
    index = index_with(1)
    prompt = chain("a", 4)
    index.store(prompt[2:], 0, parent=prompt[1])
    assert len(index) == 0


def test_many_replicas() -> None:
    rows = 500
    index = index_with(rows)
    prompt = chain("a", 30)
    depths = np.random.default_rng(0).integers(0, 31, rows)
    for row in range(rows):
        index.store(prompt[: depths[row]], row)
    assert index.match(prompt, 0.0, rows).depths.tolist() == depths.tolist()


def test_a_prompt_of_240_000_tokens_over_96_replicas_takes_a_few_looks() -> None:
    """Not one per chunk and replica: that took 674 ms elsewhere."""
    index = index_with(96, max_entries=10_000)
    prompt = tuple(digest_of(f"{i}") for i in range(3750))
    depths = [0, 1, 500, 3750, 1200, 500] * 16
    for row, depth in enumerate(depths):
        index.store(prompt[:depth], row)
    looks = 0
    holders = index._holders

    def counted(digest: bytes, now_s: float) -> int:
        nonlocal looks
        looks += 1
        return holders(digest, now_s)

    index._holders = counted  # type: ignore[method-assign]
    assert index.match(prompt, 0.0, 96).depths.tolist() == depths
    assert looks < 5 * 12 + 12, "about the logarithm of the length for each different depth"


def test_it_needs_room() -> None:
    with pytest.raises(ValueError, match="routing_index_entries"):
        PrefixIndex(0)


class IndexMachine(RuleBasedStateMachine):
    """Against a dictionary of sets, with room enough that nothing is dropped."""

    ROWS = 4
    prompts = st.builds(
        lambda name, length, forks: chain(name, length, forks),
        st.sampled_from("ab"),
        st.integers(0, 8),
        st.dictionaries(st.integers(0, 7), st.sampled_from("xy"), max_size=2),
    )
    rows = st.integers(0, ROWS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.index = index_with(self.ROWS)
        self.held: dict[int, set[bytes]] = {row: set() for row in range(self.ROWS)}
        self.parent_of: dict[bytes, bytes] = {}

    @rule(prompt=prompts, row=rows)
    def store(self, prompt: tuple[bytes, ...], row: int) -> None:
        self.index.store(prompt, row)
        self.held[row].update(prompt)
        self.parent_of.update(itertools.pairwise(reversed(prompt)))

    @rule(prompt=prompts, row=rows)
    def evict_leaf(self, prompt: tuple[bytes, ...], row: int) -> None:
        held = self.held[row]
        depth = sum(digest in held for digest in prompt)
        if depth and not any(self.parent_of.get(digest) == prompt[depth - 1] for digest in held):
            self.index.evict(prompt[depth - 1 : depth], row)
            held.discard(prompt[depth - 1])

    @rule(row=rows)
    def clear(self, row: int) -> None:
        self.index.clear_replica(row)
        self.held[row] = set()

    @rule(row=rows)
    def replace(self, row: int) -> None:
        self.index.remove_replica(row)
        self.index.add_replica(row)
        self.held[row] = set()

    @rule(prompt=prompts)
    def match(self, prompt: tuple[bytes, ...]) -> None:
        wanted = []
        for row in range(self.ROWS):
            held = [digest in self.held[row] for digest in prompt]
            wanted.append(held.index(False) if False in held else len(held))
        match = self.index.match(prompt, 0.0, self.ROWS)
        assert match.depths.tolist() == wanted
        counts = [sum(depth > at for depth in wanted) for at in range(len(prompt))]
        assert match.num_common == sum(count > self.ROWS / 2 for count in counts)

    @invariant()
    def check(self) -> None:
        self.index.check()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
