"""What routers are told of a tree, against the tree itself."""

import random

import pytest

from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.chunk_journal import ChunkJournal
from chunkserve.replica.chunk_pool import ChunkPool
from chunkserve.replica.prefix_tree import PrefixTree, RootKey
from chunkserve.replica.protocol import StepTime
from chunkserve.replica.step_fit import StepFit
from chunkserve.router.prefix_index import PrefixIndex

C = 4
SCHEME = ChunkScheme(model="m", dtype="float32", chunk_size=C)


def journaled_tree(slots: int = 40) -> tuple[PrefixTree, ChunkJournal]:
    journal = ChunkJournal(SCHEME, epoch=7)
    return PrefixTree(ChunkPool(slots), C, journal=journal), journal


def serve(tree: PrefixTree, prompt: list[int], root_key: RootKey = "", new: int = 0) -> None:
    """Compute a prompt and some tokens after it, and leave."""
    path = tree.join(tree.match(root_key, prompt)).path
    tree.commit(path, 0, len(prompt))
    for at in range(new):
        tree.append(path, 1000 + at)
        tree.commit(path, len(prompt) + at, len(prompt) + at + 1)
    tree.leave(path)


def test_router_and_tree_name_the_same_chunks_byte_for_byte() -> None:
    tree, journal = journaled_tree()
    prompt = list(range(3 * C + 2))
    serve(tree, prompt, "salt", new=5)
    wanted = SCHEME.digests("salt", [*prompt, 1000, 1001, 1002, 1003, 1004])
    told = journal.delta(None)
    assert [digest for digest, _, _ in told.changes] == list(wanted)
    assert [parent for _, parent, _ in told.changes] == [None, *wanted[:-1]]


def test_no_router_hears_of_private_chunks() -> None:
    tree, journal = journaled_tree()
    serve(tree, list(range(3 * C)), 1, new=2 * C)
    assert journal.delta(None).changes == ()
    assert tree.num_nodes == 0


def test_deltas_continue_each_other_and_a_foreign_epoch_gets_all() -> None:
    tree, journal = journaled_tree()
    serve(tree, list(range(2 * C)))
    first = journal.delta(None)
    assert (first.is_snapshot, len(first.changes)) == (True, 2)
    serve(tree, list(range(3 * C)))
    second = journal.delta((7, first.sequence))
    assert (second.is_snapshot, len(second.changes), second.sequence) == (False, 1, 3)
    assert journal.delta((7, 3)).changes == ()
    assert journal.delta((6, 3)).is_snapshot
    assert journal.delta((7, 99)).is_snapshot


def test_a_log_that_does_not_reach_back_gives_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkserve.replica.chunk_journal._LOG_CHANGES", 4)
    _, journal = journaled_tree()
    tree = PrefixTree(ChunkPool(40), C, journal=journal)
    serve(tree, list(range(6 * C)))
    assert journal.delta((7, 3)).is_snapshot is False
    assert journal.delta((7, 1)).is_snapshot is True


@pytest.mark.parametrize("seed", range(5))
def test_an_index_that_follows_the_deltas_equals_the_tree(seed: int) -> None:
    draw = random.Random(seed)
    tree, journal = journaled_tree(slots=24)
    index = PrefixIndex(10_000)
    index.add_replica(0)
    cursor: tuple[int, int] | None = None
    running: list[tuple[list, int]] = []
    for _ in range(300):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 5 * C))]
        match = tree.match("", prompt)
        if match.waits_for is None and tree.can_join(match):
            path = tree.join(match).path
            tree.commit(path, 0, len(prompt))
            running.append((path, len(prompt)))
        while running and draw.random() < 0.6:
            tree.leave(running.pop(draw.randrange(len(running)))[0])
        if draw.random() < 0.02:
            tree.clear()
        if draw.random() < 0.3:
            delta = journal.delta(cursor)
            cursor = (delta.epoch, delta.sequence)
            for digest, parent, is_stored in delta.changes:
                if is_stored:
                    index.store((digest,), 0, parent)
                else:
                    index.evict((digest,), 0)
            held = {node.digest for node in tree.nodes() if node.digest is not None}
            assert set(journal._held) == held
            probe = [draw.randrange(2) for _ in range(5 * C)]
            digests = SCHEME.digests("", probe)
            deep = next((i for i, digest in enumerate(digests) if digest not in held), len(digests))
            assert index.match(digests, 0.0, 1).depths.tolist() == [deep]
    tree.check()
    index.check()


def test_waiting_prompts_count_what_they_will_compute() -> None:
    tree, journal = journaled_tree()
    serve(tree, list(range(2 * C)))
    held = (SCHEME.digests("", list(range(2 * C + 3))), 2 * C + 3)
    new = (SCHEME.digests("", list(range(100, 100 + 5 * C))), 5 * C)
    assert journal.uncached_tokens([held]) == 3
    assert journal.uncached_tokens([new]) == 5 * C
    assert journal.uncached_tokens([new, new, held]) == 5 * C + 1 + 3


def test_the_fit_finds_what_steps_cost() -> None:
    true = StepTime(fixed_s=0.004, per_token_s=3e-4, per_context_s=2e-8, per_sequence_s=5e-4)
    fit, draw = StepFit(), random.Random(0)
    for _ in range(600):
        tokens, context, sequences = draw.randint(1, 512), draw.randint(1, 4000), draw.randint(1, 64)
        seconds = 0.004 + 3e-4 * tokens + 2e-8 * tokens * context + 5e-4 * sequences
        noise = 1 + draw.gauss(0, 0.02)
        fit.observe(seconds * noise, tokens=tokens, context_tokens=context, sequences=sequences)
    assert fit.step.per_token_s == pytest.approx(true.per_token_s, rel=0.1)
    assert fit.step.per_sequence_s == pytest.approx(true.per_sequence_s, rel=0.15)
    assert fit.step.fixed_s == pytest.approx(true.fixed_s, rel=0.4)


def test_the_fit_stays_sane_when_all_steps_are_alike() -> None:
    fit = StepFit()
    for _ in range(5000):
        fit.observe(0.01, tokens=8, context_tokens=500.0, sequences=8)
    step = fit.step
    predicted = step.fixed_s + 8 * step.per_token_s + 8 * 500 * step.per_context_s + 8 * step.per_sequence_s
    assert predicted == pytest.approx(0.01, rel=0.02)
