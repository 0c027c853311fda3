import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.protocol import ChunkDelta, RoutingReport, StepTime
from chunkserve.router.policy import PolicyError, PolicyOptions, policy_options
from chunkserve.router.routing_state import RoutingState
from chunkserve.router.shared_state import follow_chunks

SCHEME = ChunkScheme(model="m", dtype="bfloat16", chunk_size=16)


def state_of(*names: str, policy: str = "prefix", **options: object) -> RoutingState:
    state = RoutingState(
        policy=policy,
        options=PolicyOptions(**options),
        chunk_size=16,
        chunk_identity=SCHEME.identity,
        seed=0,
    )
    state.set_replicas(names, 0.0)
    return state


def report(taken_at_s: float = 1.0, **changes: object) -> RoutingReport:
    base = RoutingReport(
        epoch=1,
        taken_at_s=taken_at_s,
        backlog_s=0.0,
        running_sequences=0,
        waiting_sequences=0,
        chunks_total=1000,
        chunks_in_use=0,
        chunks_retained=0,
        step=StepTime(per_token_s=1e-3),
        max_step_tokens=512,
        chunk_identity=SCHEME.identity,
    )
    return replace(base, **changes)


def prompt(name: str, num_tokens: int = 400, salt: str = "") -> tuple[int, tuple[bytes, ...]]:
    """Length and digests of a prompt."""
    draw = random.Random(name)
    return num_tokens, SCHEME.digests(salt, [draw.randrange(1000) for _ in range(num_tokens)])


def send(state: RoutingState, key: str, what: tuple[int, tuple[bytes, ...]], now_s: float = 1.0) -> tuple[str, int]:
    """Open and route a request; the replica, and the cached tokens expected there."""
    state.open(key, *what)
    route = state.route_open(key, 10, now_s)
    return route.replicas[0], route.cached_tokens


def test_a_second_request_follows_the_first_before_it_is_computed() -> None:
    state = state_of("a", "b", "c")
    first, cached = send(state, "1", prompt("p"))
    assert cached == 0
    assert send(state, "2", prompt("p")) == (first, 399)
    state.check()


def test_16_cold_requests_with_one_new_prefix_are_computed_once() -> None:
    state = state_of("a", "b", "c", "d")
    routes = [send(state, f"{i}", prompt("p", 1600)) for i in range(16)]
    assert len({name for name, _ in routes}) == 1
    assert sum(cached for _, cached in routes) >= 15 * 1599


def test_four_routers_that_do_not_talk_agree_on_a_new_prefix_and_part_on_many() -> None:
    states = [state_of("a", "b", "c", "d") for _ in range(4)]
    firsts = [[send(state, f"{i}", prompt(f"p{i}"))[0] for i in range(12)] for state in states]
    # Each balances its own requests, so the later ones may part; those before any load agree.
    assert len({first[0] for first in firsts}) == 1
    assert len({name for first in firsts for name in first}) == 4


def test_salts_share_nothing() -> None:
    state = state_of("a")
    send(state, "1", prompt("p", salt="tenant one"))
    assert send(state, "2", prompt("p", salt="tenant two"))[1] == 0
    assert send(state, "3", prompt("p", salt="tenant one"))[1] == 399


def test_what_was_computed_is_known_and_what_was_not_is_forgotten() -> None:
    state = state_of("a")
    send(state, "1", prompt("computed"))
    send(state, "2", prompt("cancelled"))
    assert state.first_token("1", 0) == ("a", 0)
    state.close("1")
    state.close("2")
    assert send(state, "3", prompt("computed"), now_s=1000.0)[1] == 399
    assert send(state, "4", prompt("cancelled"), now_s=1000.0)[1] == 0


def test_a_short_hit_is_counted_as_stale() -> None:
    state = state_of("a")
    send(state, "1", prompt("p"))
    send(state, "2", prompt("p"))
    state.first_token("1", 0)
    state.first_token("2", 16)
    assert state.counters.stale_hits == 1
    assert (state.counters.predicted_cached_tokens, state.counters.actual_cached_tokens) == (399, 16)


def test_deltas_tell_of_chunks_stored_and_evicted() -> None:
    state = state_of("a", "b")
    state.report("a", report())
    size, digests = prompt("p", 64)
    changes = tuple((d, p, True) for d, p in zip(digests, [None, *digests[:-1]], strict=True))
    state.apply("a", (1, 0), ChunkDelta(epoch=1, sequence=4, is_snapshot=False, changes=changes))
    assert send(state, "1", (size, digests)) == ("a", 63)
    state.close("1")
    gone = tuple((d, None, False) for d in reversed(digests[1:]))
    state.apply("a", (1, 4), ChunkDelta(epoch=1, sequence=7, is_snapshot=False, changes=gone))
    assert send(state, "2", (size, digests), now_s=1000.0) == ("a", 16)
    state.check()


def test_a_delta_that_does_not_continue_the_last_is_dropped_and_a_snapshot_repairs() -> None:
    state = state_of("a")
    state.report("a", report())
    _, digests = prompt("p", 32)
    stored = ((digests[0], None, True), (digests[1], digests[0], True))
    state.apply("a", (1, 5), ChunkDelta(epoch=1, sequence=9, is_snapshot=False, changes=stored))
    assert state.cursors() == {"a": (1, 0)}
    assert len(state.index) == 0
    state.apply("a", (1, 0), ChunkDelta(epoch=1, sequence=9, is_snapshot=True, changes=stored))
    assert state.cursors() == {"a": (1, 9)}
    state.apply("a", (1, 9), ChunkDelta(epoch=1, sequence=90, is_snapshot=True, changes=stored[:1]))
    assert state.counters.gaps == 1
    assert send(state, "1", (32, digests))[1] == 16


def test_a_new_epoch_empties_a_replica_at_once_and_late_news_of_the_old_are_dropped() -> None:
    state = state_of("a", "b")
    state.report("a", report())
    size, digests = prompt("p", 64)
    changes = tuple((d, p, True) for d, p in zip(digests, [None, *digests[:-1]], strict=True))
    state.apply("a", (1, 0), ChunkDelta(epoch=1, sequence=4, is_snapshot=False, changes=changes))
    state.report("a", report(2.0, epoch=2))
    assert send(state, "1", (size, digests), now_s=2.0)[1] == 0
    state.close("1")
    state.apply("a", (1, 4), ChunkDelta(epoch=1, sequence=8, is_snapshot=False, changes=changes))
    assert send(state, "2", (size, digests), now_s=1000.0)[1] == 0


def test_a_dead_replica_vanishes_and_comes_back_empty() -> None:
    state = state_of("a", "b")
    name, _ = send(state, "1", prompt("p"))
    state.first_token("1", 0)
    state.close("1")
    state.remove_replica(name)
    other, cached = send(state, "2", prompt("p"))
    assert (other != name, cached) == (True, 0)
    state.set_replicas(["a", "b"], 5.0)
    state.close("2")
    assert send(state, "3", prompt("q"), now_s=6.0)[1] == 0
    state.check()


def test_another_chunk_identity_is_routed_by_load_only_and_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    state = state_of("a")
    state.report("a", report(chunk_identity="other/64"))
    assert "replica_mismatch" in caplog.text
    send(state, "1", prompt("p"))
    state.first_token("1", 0)
    assert send(state, "2", prompt("p"))[1] == 0


def test_draining_replicas_get_nothing_while_there_are_others() -> None:
    state = state_of("a", "b")
    name, _ = send(state, "1", prompt("p"))
    state.report(name, report(draining=True))
    assert all(send(state, f"x{i}", prompt("p"))[0] != name for i in range(10))
    other = "b" if name == "a" else "a"
    state.report(other, report(draining=True))
    assert send(state, "y", prompt("p"))[0] in ("a", "b")


def test_an_idle_replica_that_drains_does_not_make_the_others_look_unbalanced() -> None:
    """By its counts alone, 40 against 0, `threshold` would leave the prompt's replica."""
    state = state_of("a", "b", "drains", policy="threshold")
    for name, requests in (("a", 40), ("b", 38), ("drains", 0)):
        state.report(name, report(running_sequences=requests, draining=name == "drains"))
    size, digests = prompt("p")
    state.index.store(digests, state._replicas["a"].row)
    assert send(state, "1", (size, digests)) == ("a", 399)
    state.report("drains", report(2.0))
    assert send(state, "2", (size, digests), now_s=2.0)[0] == "drains"


def test_reports_of_health_and_equal_replica_sets_touch_no_load() -> None:
    state = state_of("a", "b")
    names = {send(state, f"{i}", prompt(f"p{i}"))[0] for i in range(6)}
    assert names == {"a", "b"}
    state.first_token("0", 0)
    before = [getattr(state.loads, name).tolist() for name in ("_own_us", "_since_us", "_in_flight", "_sent_since")]
    assert any(before[0])
    for _ in range(3):
        state.set_replicas(["b", "a"], 2.0)
        state.set_replicas(["a", "b"], 2.0)
    state.check()
    after = [getattr(state.loads, name).tolist() for name in ("_own_us", "_since_us", "_in_flight", "_sent_since")]
    assert after == before
    # A replica that says it has nothing, while ours are on their way, is not believed about those.
    state.report("a", report(0.5))
    assert state.loads.num_requests(np.arange(2), 1.0).sum() == 6


def test_a_feed_that_fails_for_a_while_leaves_what_answers_tell_and_a_snapshot_repairs_the_rest() -> None:
    state = state_of("a", policy="prefix")
    state.report("a", report(sequence=8))
    size, digests = prompt("seen", 64)
    other_size, others = prompt("unseen", 64)
    told = ChunkDelta(
        epoch=1,
        sequence=8,
        is_snapshot=True,
        changes=tuple((d, p, True) for chain in (digests, others) for d, p in zip(chain, (None, *chain), strict=False)),
    )
    asked: list[dict[str, tuple[int, int]]] = []

    def ask(since: Mapping[str, tuple[int, int]]) -> list[tuple[str, ChunkDelta | None]]:
        asked.append(dict(since))
        if len(asked) <= 3:
            raise TimeoutError("no answer")
        return [("a", told if len(asked) == 4 else None)]

    async def follow() -> None:
        feed = asyncio.create_task(follow_chunks(state, ask, period_s=0.001))
        while len(asked) < 3:
            await asyncio.sleep(0.001)
        # In the meantime: approximate.
        send(state, "1", (size, digests))
        state.first_token("1", 0)
        state.close("1")
        assert send(state, "2", (size, digests), now_s=1000.0)[1] == 63
        assert send(state, "3", (other_size, others), now_s=1000.0)[1] == 0
        while len(asked) < 6:
            await asyncio.sleep(0.001)
        feed.cancel()

    asyncio.run(follow())
    assert asked[:4] == [{"a": (1, 0)}] * 4, "it goes on from where it was"
    assert asked[5] == {"a": (1, 8)}
    assert send(state, "4", (other_size, others), now_s=2000.0)[1] == 63
    state.check()


def test_replicas_are_asked_while_requests_are_open_or_they_report_changes_and_else_left_alone() -> None:
    state = state_of("a", policy="prefix")
    size, digests = prompt("p", 64)
    asked: list[dict[str, tuple[int, int]]] = []
    rounds = 0

    def ask(since: Mapping[str, tuple[int, int]]) -> list[tuple[str, ChunkDelta | None]]:
        asked.append(dict(since))
        return [("a", ChunkDelta(epoch=1, sequence=5, is_snapshot=False, changes=((digests[0], None, True),)))]

    def count() -> None:
        nonlocal rounds
        rounds += 1

    async def some_rounds() -> None:
        begin = rounds
        while rounds < begin + 5:
            await asyncio.sleep(0.001)

    async def follow() -> None:
        feed = asyncio.create_task(follow_chunks(state, ask, period_s=0.001, on_round=count))
        state.report("a", report(1.0))
        await some_rounds()
        assert not asked, "a replica without chunks, and no request"
        state.report("a", report(2.0, sequence=5))
        assert state.replica_views(4.5)["a"].index_lag_s == 2.5
        await some_rounds()
        assert asked == [{"a": (1, 0)}], "asked once, since the answer told all that was reported"
        assert state.replica_views(4.5)["a"].index_lag_s == 0
        assert len(state.index) == 1
        state.open("1", size, digests)
        await some_rounds()
        assert len(asked) > 2, "an open request changes chunks before the next report"
        state.close("1")
        await some_rounds()
        num_asked = len(asked)
        await some_rounds()
        assert len(asked) == num_asked
        feed.cancel()

    asyncio.run(follow())


def test_a_replica_that_has_computed_nothing_is_taken_to_be_like_one_that_has() -> None:
    """It reports what everybody believes before the first step: beside measured ones that would look fast."""
    state = state_of("a", "b")
    size, digests = prompt("p", 64)
    slow = StepTime(fixed_s=1.0, per_token_s=0.05)
    for name, step in (("a", slow), ("b", StepTime())):
        state.report(name, report(step=step))
    state.index.store(digests, state._replicas["a"].row)
    assert send(state, "1", (size, digests))[0] == "a"
    state.report("b", report(2.0, step=StepTime(fixed_s=0.001, per_token_s=1e-3)))
    assert send(state, "2", (size, digests), now_s=2.0)[0] == "b"


@pytest.mark.parametrize("names", ["ab", "cd", "ef", "gh", "xyz"])
def test_prompts_of_an_idle_cluster_are_found_again_whoever_got_them(names: str) -> None:
    """Where rendezvous gives one replica most of the first few prompts, it may keep them."""
    state = state_of(*names)
    for name in names:
        state.report(name, report(step=StepTime(fixed_s=0.05, per_token_s=0.002)))
    for number in range(40):
        size, digests = prompt(f"{names} {number}")
        first, cached = send(state, f"{number}", (size, digests), now_s=5.0 * number)
        assert cached == 0
        state.first_token(f"{number}", 0)
        state.close(f"{number}")
        for question in "xy":
            key = f"{number} {question}"
            assert send(state, key, (size, digests[:20]), now_s=5.0 * number + 2)[0] == first, number
            state.first_token(key, 320)
            state.close(key)


def test_what_was_sent_counts_by_what_steps_cost_now() -> None:
    """A machine that was busy when it was sent would seem to have had more than its share for a minute."""
    state = state_of("a", "b")
    for name in ("a", "b"):
        state.report(name, report(step=StepTime(fixed_s=0.0, per_token_s=0.1)))
    first, _ = send(state, "1", prompt("p"))
    state.first_token("1", 0)
    state.close("1")
    for name in ("a", "b"):
        state.report(name, report(2.0, step=StepTime(fixed_s=0.0, per_token_s=0.001)))
    assert send(state, "2", prompt("p"), now_s=2.0) == (first, 399)


def test_a_failed_replica_is_avoided_by_the_request_that_failed() -> None:
    state = state_of("a", "b")
    first, _ = send(state, "1", prompt("p"))
    state.failed("1")
    assert state.route_open("1", 10, 1.0).replicas[0] != first
    state.failed("1")
    assert state.route_open("1", 10, 1.0).replicas[0] in ("a", "b")
    state.close("1")
    assert state.loads.num_open == 0


def test_a_route_after_the_end_reserves_nothing() -> None:
    state = state_of("a")
    size, digests = prompt("p")
    state.open("1", size, digests)
    state.close("1")
    with pytest.raises(LookupError, match="not open"):
        state.route_open("1", 10, 1.0)
    state.route("1", size, digests, 10, 1.0)
    assert state.loads.num_open == 0
    state.rerouted("1", "a", 1.0)
    assert state.loads.num_open == 0


def test_ten_thousand_requests_with_every_end_leave_nothing() -> None:
    draw = random.Random(0)
    names = ["a", "b", "c"]
    state = state_of(*names)
    prompts = [prompt(f"p{i}", 16 * (1 + i)) for i in range(20)]
    live: list[str] = []
    for number in range(10_000):
        now_s = number / 100
        live.append(f"{number}")
        state.open(live[-1], *draw.choice(prompts))
        fate = draw.random()
        if fate < 0.9:
            state.route_open(live[-1], 10, now_s)
        if fate < 0.1:
            state.rerouted(live[-1], draw.choice(names), now_s)
        elif fate < 0.2:
            state.failed(live[-1])
        elif fate < 0.6:
            state.first_token(draw.choice(live), 0)
        if fate > 0.97:
            state.report(draw.choice(names), report(now_s, backlog_s=draw.random()))
        if fate > 0.995:
            state.remove_replica(draw.choice(names))
            state.set_replicas(names, now_s)
        while live and draw.random() < 0.6:
            state.close(live.pop(draw.randrange(len(live))))
    for key in live:
        state.close(key)
    state.check()
    assert state.num_open == state.loads.num_open == 0
    assert not any(getattr(state.loads, name).any() for name in ("_own_us", "_since_us", "_in_flight", "_sent_since"))


def test_a_day_of_unique_prompts_stays_within_the_bound() -> None:
    state = RoutingState(policy="prefix", chunk_size=16, max_entries=500)
    state.set_replicas(["a", "b"], 0.0)
    for number in range(2000):
        key = f"{number}"
        send(state, key, prompt(key, 160), float(number))
        state.first_token(key, 0)
        state.close(key)
    assert len(state.index) <= 500
    assert len(state.index._digest) <= 501
    state.check()


def test_no_replica_is_said() -> None:
    with pytest.raises(LookupError, match="no replica"):
        state_of().route("1", 10, (), 10, 0.0)


def test_wrong_knobs_are_named() -> None:
    with pytest.raises(PolicyError, match="'x'"):
        RoutingState(policy="x", chunk_size=16)
    with pytest.raises(ValueError, match="no option overlod"):
        policy_options({"overlod": 1})
    with pytest.raises(ValueError, match="no option decode"):
        policy_options({"cost": {"decode": 1}})
    assert policy_options({"overload": 1, "cost": {"decode_weight": 0}}).cost.decode_weight == 0
