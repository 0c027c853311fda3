"""Ranks with a model whose keys prove themselves: their trees stay equal, and what makes them differ is named."""

import random
from collections.abc import Callable, Iterator

import pytest

from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.protocol import Request, SamplingParams
from chunkserve.replica.rank_sync import RanksDiffer, RankStatus, compare
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.replica.tree_edit import Join, encode

from .rank_threads import Ranks, fake_ranks

pytestmark = pytest.mark.model

C = 16


@pytest.fixture
def make(tokenizer: Tokenizer) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def build(num_ranks: int = 2, **sizes: object) -> Ranks:
        made.append(fake_ranks(tokenizer, num_ranks, **sizes))
        return made[-1]

    yield build
    for ranks in made:
        ranks.close()


def assert_equal_trees(ranks: Ranks) -> None:
    """Once idle: all trees hold the same chunks in the same slots."""
    ranks.run()
    ranks.turn()
    trees = [ranks.engine._tree, *(follower.core.scheduler.tree for follower in ranks.followers.values())]
    for tree in trees:
        tree.check()
    content = [sorted((n.slot, n.node_id, tuple(n.tokens), n.num_ready, n.last_used) for n in t.nodes()) for t in trees]
    assert all(one == content[0] for one in content[1:])
    for follower in ranks.followers.values():
        assert not follower.core.scheduler.running
        assert not follower.core.scheduler.waiting


def expected(prompt: list[int], max_tokens: int, salt: str = "") -> tuple[int, ...]:
    fake = FakeModelRunner(vocab_size=97, num_slots=1, chunk_size=C)
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(fake.next_token(salt, token_ids))
    return tuple(token_ids[len(prompt) :])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_keeps_trees_equal(make: Callable[..., Ranks], num_ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    ranks = make(
        num_ranks,
        num_slots=rng.choice([33, 40]),
        max_running=rng.choice([3, 8]),
        max_step_tokens=rng.choice([8, 20]),
        retain_prefixes=seed != 1,
    )
    stems = [[rng.randrange(4) for _ in range(size)] for size in (0, 5, C - 1, C, 3 * C)]
    wanted, cancelled = {}, set()
    for i in range(30):
        prompt = [*rng.choice(stems), *[rng.randrange(2) for _ in range(rng.randrange(1, 2 * C))]]
        salt, length = rng.choice(["", "", "a"]), rng.randrange(1, 40)
        wanted[f"r{i}"] = expected(prompt, length, salt)
        ranks.submit(f"r{i}", prompt, length, cache_salt=salt, n=rng.choice([1, 1, 2]), prefix_cache=i % 5 != 4)
        for _ in range(rng.randrange(4)):
            ranks.turn()
        if rng.random() < 0.2:
            cancelled.add(f"r{rng.randrange(i + 1)}")
            ranks.engine.cancel(max(cancelled))
    assert_equal_trees(ranks)
    assert {name: ranks.tokens(name) for name in wanted if name not in cancelled} == {
        name: tokens for name, tokens in wanted.items() if name not in cancelled
    }
    ranks.engine.clear_prefixes()
    assert_equal_trees(ranks)
    assert ranks.engine._tree.num_nodes == 0


def test_edits_longer_than_a_step_carries_go_on_in_the_next(make: Callable[..., Ranks]) -> None:
    ranks = make(max_sequence_tokens=4096, num_slots=300)
    ranks.submit("short", [1, 2, 3], 200)
    while not ranks.tokens("short"):
        ranks.turn()
    prompt = [i % 90 for i in range(3000)]
    ranks.submit("long", prompt, 2)
    before = ranks.engine.load().steps
    ranks.turn()
    capacity = ranks.sync._control.capacity
    assert 4 * len(prompt) > 5 * capacity
    while len(ranks.engine._scheduler.running) < 2:
        assert ranks.turn()
    assert ranks.engine.load().steps - before >= 4 * len(prompt) // capacity
    assert_equal_trees(ranks)
    assert ranks.tokens("long") == expected(prompt, 2)
    assert ranks.tokens("short") == expected([1, 2, 3], 200)


def test_a_prompt_of_100_000_tokens_comes_beside_a_stream_that_goes_on(make: Callable[..., Ranks]) -> None:
    ranks = make(
        max_sequence_tokens=101_000, chunk_size=64, num_slots=1700, max_step_tokens=4096, max_running=4, hidden=512
    )  # fmt: skip
    ranks.submit("stream", [1, 2, 3], 400)
    while not ranks.tokens("stream"):
        ranks.turn()
    prompt = [i * 7 % 90 for i in range(100_000)]
    ranks.submit("long", prompt, 2)
    request = Request(request_id="", prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=2))
    num_bytes = len(encode(Join(arrival=1, request=request, seed=1)))
    control = ranks.sync._control
    assert control.num_open == 1
    num_steps = 1 + -(-(num_bytes - control.room) // control.capacity)
    assert 150 < num_steps < 250
    for _ in range(num_steps):
        streamed, carried = len(ranks.tokens("stream")), ranks.sync.carried_bytes
        assert ranks.turn()
        assert len(ranks.engine._scheduler.running) == 1
        assert len(ranks.tokens("stream")) == streamed + 1
        assert ranks.sync._own.rows == 1, "nothing but control rows is added to the stream's step"
        assert ranks.sync.carried_bytes - carried <= control.capacity
    ranks.turn()
    assert control.num_open == 1
    assert len(ranks.engine._scheduler.running) == 2
    assert_equal_trees(ranks)
    assert ranks.tokens("long") == expected(prompt, 2)
    assert len(ranks.tokens("stream")) == 400


def test_a_stop_string_that_the_leader_alone_sees_ends_the_sequence_everywhere(make: Callable[..., Ranks]) -> None:
    ranks = make()
    ranks.submit("plain", [1, 2, 3], 20)
    ranks.run()
    text = "".join(event.text for event in ranks.events["plain"])
    ranks.submit("stopped", [1, 2, 3], 200, stop=(text[5:8],))
    assert_equal_trees(ranks)
    assert "".join(event.text for event in ranks.events["stopped"]) == text[: text.index(text[5:8])]
    assert ranks.events["stopped"][-1].finish_reason == "stop"


def turns(ranks: Ranks, count: int) -> None:
    for _ in range(count):
        ranks.turn()


def fails(ranks: Ranks) -> str:
    """The leader's words, within a few steps."""
    with pytest.raises(RanksDiffer) as caught:
        turns(ranks, 4)
    return ranks.sync.explain(caught.value)


def warm(make: Callable[..., Ranks], num_ranks: int) -> Ranks:
    ranks = make(num_ranks)
    ranks.submit("kept", [5] * 40, 4)
    ranks.run()
    ranks.submit("running", [1, 2, 3], 300)
    for _ in range(5):
        ranks.turn()
    return ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_flipped_token_is_caught_in_the_next_step(make: Callable[..., Ranks], num_ranks: int) -> None:
    ranks = warm(make, num_ranks)
    tree = ranks.followers[num_ranks - 1].core.scheduler.tree
    chunk = next(node for node in tree.nodes() if node.num_refs == 0)
    chunk.tokens[3] ^= 1
    sent = len(ranks.tokens("running"))
    # The follower may have begun its next step already.
    with pytest.raises(RanksDiffer, match=rf"ranks differ at step \d+: rank {num_ranks - 1}: tree [0-9a-f]+, not"):
        turns(ranks, 2)
    assert len(ranks.tokens("running")) - sent <= 1


def test_another_sampled_token_is_caught_in_the_next_step(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = warm(make, 3)
    core = ranks.followers[2].core
    settle = core.settle

    def wrong(outcome):
        sampled = {s: type(one)(token_id=one.token_id ^ 1) for s, one in outcome.sampled.items()}
        settle(type(outcome)(batch=outcome.batch, sampled=sampled, ended=outcome.ended))

    monkeypatch.setattr(core, "settle", wrong)
    words = fails(ranks)
    assert "rank 2: tree" in words
    assert "sampled" in words


def test_a_lost_edit_is_caught_though_the_shapes_differ(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of three, two would meet in a sum that gloo ends by ending the process, which is this one here.
    ranks = warm(make, 2)
    monkeypatch.setattr(ranks.followers[1]._sync, "_hear", lambda payload: None)
    ranks.submit("lost", [7] * 20, 4)
    words = fails(ranks)
    assert "rank 1: rows 1, not" in words
    assert "edits" in words
    assert not ranks.tokens("lost")


def test_another_pool_size_is_caught_in_the_first_step(make: Callable[..., Ranks]) -> None:
    ranks = make(3, pools={1: 60})
    ranks.submit("first", [1, 2, 3], 4)
    assert "ranks differ at step 1: rank 1: pool_chunks 60, not 64" in fails(ranks)
    assert not ranks.tokens("first")


def test_the_dump_of_each_rank_tells_edits_and_no_words(
    make: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = warm(make, 2)
    tree = ranks.followers[1].core.scheduler.tree
    next(node for node in tree.nodes() if node.num_refs == 0).tokens[3] ^= 1
    words = fails(ranks)
    ranks.sync.leave(words)
    ranks.threads[0].join(20)
    for rank in range(2):
        dump = next(m for record in caplog.records if f"rank stops rank={rank}" in (m := record.getMessage()))
        assert "Join arrival=1 n=1 prompt_tokens=40" in dump
        assert "ranks differ at step" in dump
        assert "5, 5" not in dump


def test_most_ranks_are_right_and_rank_0_in_doubt() -> None:
    good = RankStatus(step=4, rows=3, carriers=1, pool_chunks=9, edits=b"e", tree=b"t", sampled=b"s")
    bad = RankStatus(step=4, rows=3, carriers=1, pool_chunks=9, edits=b"e", tree=b"t", sampled=b"x")
    assert compare([good, good, good]) is None
    assert compare([good, bad, good]) == "rank 1: sampled 78, not 73"
    assert compare([bad, good, good]) == "rank 0: sampled 78, not 73"
    assert compare([good, bad]) == "rank 1: sampled 78, not 73"
    assert compare([good, good, None]) == "rank 2: has not begun the step"
