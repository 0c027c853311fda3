"""PrefixTree and ChunkPool against a dictionary of token lists, and the cases that broke other engines."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from chunkserve.replica.chunk_pool import ChunkPool, PoolFull
from chunkserve.replica.prefix_tree import Joined, Node, PrefixTree

C = 4


def make_tree(num_slots: int = 32, **options: bool) -> PrefixTree:
    return PrefixTree(ChunkPool(num_slots), C, **options)


def run(tree: PrefixTree, tokens: list[int], root: str = "") -> Joined:
    """Join and compute the whole prompt."""
    joined = tree.join(tree.match(root, tokens))
    tree.commit(joined.path, joined.num_cached, len(tokens))
    tree.check()
    return joined


def slots(joined: Joined) -> list[int]:
    return [node.slot for node in joined.path]


def test_full_chunks_are_shared_and_the_rest_is_copied() -> None:
    tree = make_tree()
    first = run(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    second = tree.join(tree.match("", [1, 2, 3, 4, 5, 6, 99, 100]))
    assert slots(second)[0] == slots(first)[0]
    assert second.copy is not None
    assert (second.copy.src_slot, second.copy.dst_slot, second.copy.num_rows) == (slots(first)[1], slots(second)[1], 2)
    assert second.num_cached == second.kv_present == 6
    tree.check()


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, 2 * C, 2 * C + 1])
def test_full_hit_leaves_one_token_and_shares_the_last_chunk(length: int) -> None:
    tree = make_tree()
    tokens = list(range(length))
    first = run(tree, tokens)
    used = tree.pool.num_used
    second = tree.join(tree.match("", tokens))
    assert second.num_cached == length - 1
    tree.check()
    if length % C == 0:
        assert slots(second) == slots(first)
        assert second.kv_present == length, "K and V of the last token are there and are not appended again"
        assert tree.pool.num_used == used


def test_idle_tail_is_taken_over_where_it_matches_whole() -> None:
    tree = make_tree()
    first = run(tree, [1, 2, 3, 4, 5, 6])
    tail = slots(first)[1]
    tree.leave(first.path)
    second = tree.join(tree.match("", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert slots(second)[1] == tail
    assert second.copy is None
    assert second.num_cached == 6
    tree.check()


def test_pending_prefix_is_waited_for_and_dropped_with_its_sequence() -> None:
    tree = make_tree()
    first = tree.join(tree.match("", list(range(12))))
    tree.commit(first.path, 0, 4)
    match = tree.match("", [*range(8), 50])
    assert match.waits_for is first.path[1]
    assert not match.waits_for.is_settled
    tree.leave(first.path)
    tree.check()
    assert match.waits_for.is_settled
    assert tree.num_nodes == 1, "only the computed chunk stays"
    assert tree.match("", [*range(8), 50]).nodes == (first.path[0],)


def test_a_chunk_filled_by_decoding_gives_way_to_its_twin() -> None:
    tree = make_tree()
    paths = []
    for _ in range(2):
        joined = run(tree, [1, 2, 3])
        tree.append(joined.path, 4)
        paths.append(joined.path)
    assert not tree.commit(paths[0], 3, 4)
    assert tree.commit(paths[1], 3, 4)
    assert paths[0][0] is paths[1][0]
    assert tree.num_nodes == 1
    tree.check()


def test_completion_is_found_by_the_next_turn() -> None:
    tree = make_tree()
    first = run(tree, [1, 2, 3])
    for at, token in enumerate([7, 8, 9], start=3):
        tree.append(first.path, token)
        tree.commit(first.path, at, at + 1)
    tree.leave(first.path)
    assert run(tree, [1, 2, 3, 7, 8, 9, 10]).num_cached == 6


def test_least_recently_used_leaf_goes_first() -> None:
    tree = make_tree(num_slots=3)
    for token in (1, 2, 3):
        tree.leave(run(tree, [token] * C).path)
    tree.leave(run(tree, [1] * C).path)
    run(tree, [4] * C)
    assert tree.match("", [2] * C).nodes == ()
    assert len(tree.match("", [1] * C).nodes) == len(tree.match("", [3] * C).nodes) == 1


def test_eviction_takes_leaves_before_their_parents() -> None:
    tree = make_tree(num_slots=4)
    tree.leave(run(tree, list(range(3 * C))).path)
    run(tree, [50] * 2 * C)
    assert len(tree.match("", list(range(3 * C))).nodes) == 2


def test_full_pool_refuses_and_changes_nothing() -> None:
    tree = make_tree(num_slots=2)
    joined = run(tree, list(range(2 * C)))
    match = tree.match("", [9])
    assert not tree.can_join(match)
    with pytest.raises(PoolFull):
        tree.join(match)
    assert not tree.can_append(joined.path)
    with pytest.raises(PoolFull):
        tree.append(joined.path, 1)
    tree.check()


def test_join_never_evicts_what_it_matched() -> None:
    tree = make_tree(num_slots=3)
    tree.leave(run(tree, list(range(2 * C))).path)
    assert not tree.can_join(tree.match("", [*range(C), *[90] * (3 * C)]))
    joined = run(tree, [*range(C), *[90] * (2 * C)])
    assert joined.num_cached == C


def test_roots_never_share() -> None:
    tree = make_tree()
    run(tree, list(range(8)), "a")
    assert tree.match("b", list(range(8))).nodes == ()


def test_freed_at_once_without_retention() -> None:
    tree = make_tree(retain=False)
    first, second = run(tree, list(range(8))), run(tree, list(range(6)))
    tree.leave(first.path)
    assert tree.num_nodes == 2
    tree.leave(second.path)
    assert tree.num_nodes == 0
    tree.check()


def test_nothing_is_shared_when_sharing_is_off() -> None:
    tree = make_tree(share=False)
    first, second = run(tree, list(range(8))), run(tree, list(range(8)))
    assert not set(slots(first)) & set(slots(second))
    tree.leave(first.path)
    tree.check()
    assert tree.num_nodes == 2


def test_clear_keeps_what_runs() -> None:
    tree = make_tree()
    running = run(tree, list(range(6)))
    tree.leave(run(tree, [8] * 9).path)
    assert tree.clear() == 3
    tree.check()
    assert tree.num_nodes == len(running.path)


@dataclass
class Running:
    root: str
    tokens: list[int]
    path: list[Node]
    computed: int
    present: int


class TreeMachine(RuleBasedStateMachine):
    """Sequences come, are computed in pieces, decode and go; KV memory is modelled as the tokens behind each slot."""

    num_slots = 12
    share = True
    retain = True
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, Running] = {}
        self.next_id = 0
        self.tree = PrefixTree(ChunkPool(self.num_slots), C, share=self.share, retain=self.retain)
        # What K and V of each row would be: they depend on the root and on all tokens up to the row.
        self.memory: list[list[tuple[str, tuple[int, ...]] | None]] = [[None] * C for _ in range(self.num_slots)]

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), root=st.sampled_from("ab"))
    def join(self, tokens: list[int], root: str) -> object:
        match = self.tree.match(root, tokens)
        if match.waits_for is not None:
            return multiple()
        if not self.tree.can_join(match):
            with pytest.raises(PoolFull):
                self.tree.join(match)
            return multiple()
        joined = self.tree.join(match)
        if joined.copy:
            copy = joined.copy
            self.memory[copy.dst_slot][: copy.num_rows] = self.memory[copy.src_slot][: copy.num_rows]
        assert joined.num_cached <= len(tokens) - 1
        self.next_id += 1
        self.running[self.next_id] = Running(root, list(tokens), joined.path, joined.num_cached, joined.kv_present)
        return self.next_id

    def compute(self, seq: Running, upto: int) -> None:
        for at in range(max(seq.computed, seq.present), upto):
            self.memory[seq.path[at // C].slot][at % C] = (seq.root, tuple(seq.tokens[: at + 1]))
        self.tree.commit(seq.path, seq.computed, upto)
        seq.computed = upto

    @rule(seq=sequences, num=st.integers(1, 6))
    def prefill(self, seq: int, num: int) -> None:
        if seq in self.running:
            state = self.running[seq]
            self.compute(state, min(state.computed + num, len(state.tokens)))

    @rule(seq=sequences, token=st.integers(0, 1))
    def decode(self, seq: int, token: int) -> None:
        state = self.running.get(seq)
        if state is None or state.computed != len(state.tokens) or not self.tree.can_append(state.path):
            return
        self.tree.append(state.path, token)
        state.tokens.append(token)
        self.compute(state, len(state.tokens))

    @rule(seq=consumes(sequences))
    def leave(self, seq: int) -> None:
        self.tree.leave(self.running.pop(seq).path)

    @rule()
    def clear(self) -> None:
        self.tree.clear()

    @invariant()
    def tree_is_sound(self) -> None:
        self.tree.check()

    @invariant()
    def every_sequence_reads_its_own_keys(self) -> None:
        for seq in self.running.values():
            for at in range(max(seq.computed, seq.present)):
                assert self.memory[seq.path[at // C].slot][at % C] == (seq.root, tuple(seq.tokens[: at + 1]))

    @invariant()
    def rows_below_a_node_are_contiguous(self) -> None:
        paths = sorted([node.node_id for node in seq.path] for seq in self.running.values())
        for node in {node_id for path in paths for node_id in path}:
            rows = [i for i, path in enumerate(paths) if node in path]
            assert rows == list(range(rows[0], rows[0] + len(rows)))

    def teardown(self) -> None:
        for seq in self.running.values():
            self.tree.leave(seq.path)
        self.tree.clear()
        self.tree.check()
        assert self.tree.pool.num_free == self.tree.pool.num_slots


def machine(**options: object) -> type:
    case = type("Machine", (TreeMachine,), options).TestCase
    case.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
    return case


TestRetaining = machine()
TestTinyPool = machine(num_slots=5)
TestPaper = machine(retain=False)
TestUnshared = machine(share=False)
