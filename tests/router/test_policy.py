import dataclasses

import numpy as np
import pytest

from chunkserve.router.cost import CostModel
from chunkserve.router.policy import (
    POLICIES,
    ClusterView,
    PolicyError,
    PolicyOptions,
    RouteRequest,
    choose_replica,
)
from chunkserve.router.workloads import digest_of

OPTIONS = PolicyOptions()


def view_of(n: int, *, per_context_s: float = 0.0, per_sequence_s: float = 0.0, **changes: object) -> ClusterView:
    """n equal, idle, empty replicas, with changes."""

    def full(value: float) -> np.ndarray:
        return np.full(n, value)

    base = ClusterView(
        seeds=np.array([int.from_bytes(digest_of(f"replica {i}")[:8], "little") for i in range(n)], np.uint64),
        work_s=full(0.0),
        given_s=full(0.0),
        num_requests=np.zeros(n, np.int64),
        cached_tokens=np.zeros(n, np.int64),
        num_sharers=np.zeros(n, np.int64),
        free_tokens=full(np.inf),
        age_s=full(np.inf),
        cost=CostModel(
            fixed_s=full(0.005),
            per_token_s=full(1e-3),
            per_context_s=full(per_context_s),
            per_sequence_s=full(per_sequence_s),
            max_step_tokens=full(512),
        ),
        draw=12345678901234567890,
        turn=0,
    )
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in changes.items()}
    return dataclasses.replace(base, **arrays)


def request_of(tokens: int = 1000, anchor: str = "", **changes: object) -> RouteRequest:
    name = digest_of(anchor) if anchor else b""
    return dataclasses.replace(RouteRequest(prompt_tokens=tokens, output_tokens=50, anchor=name, head=name), **changes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_every_policy_ranks_different_replicas_of_the_view(policy: str, n: int) -> None:
    for turn in range(5):
        view = view_of(n, draw=turn * 0x123456789ABCDEF, turn=turn)
        ranked = choose_replica(policy, request_of(anchor="a"), view, OPTIONS).ranked
        assert 1 <= len(ranked) <= n
        assert len(set(ranked)) == len(ranked)
        assert set(ranked) <= set(range(n))


def test_an_unknown_policy_is_named_with_what_there_is() -> None:
    with pytest.raises(PolicyError, match=r"'prefx'.*prefix, random.*product"):
        choose_replica("prefx", request_of(), view_of(2), OPTIONS)


def test_prefix_goes_where_the_prompt_is() -> None:
    choice = choose_replica("prefix", request_of(), view_of(3, cached_tokens=[0, 640, 64]), OPTIONS)
    assert choice.ranked[:2] == (1, 2)
    assert choice.reason == "affinity"


def test_prefix_leaves_a_hit_that_costs_more_than_it_saves() -> None:
    view = view_of(3, cached_tokens=[0, 640, 0], work_s=[0.3, 4.0, 0.3])
    choice = choose_replica("prefix", request_of(), view, PolicyOptions(overload=10.0))
    assert choice.ranked[0] != 1
    assert choice.reason == "spill"


def test_prefix_keeps_overloaded_replicas_out_whatever_they_hold() -> None:
    view = view_of(4, cached_tokens=[0, 9000, 0, 0], work_s=[10.0, 30.0, 10.0, 10.0])
    request = request_of(tokens=10_000)
    assert choose_replica("prefix", request, view, PolicyOptions(overload=2.0)).ranked[0] == 1
    bound = choose_replica("prefix", request, view, PolicyOptions(overload=0.5))
    assert bound.ranked[0] != 1
    assert bound.reason == "bound"


def test_of_two_replicas_the_busy_one_keeps_its_prompt_while_waiting_costs_less_than_computing_it() -> None:
    def first(work_s: float) -> int:
        view = view_of(2, cached_tokens=[2944, 0], work_s=[work_s, 0.0])
        return choose_replica("prefix", request_of(tokens=3000), view, OPTIONS).ranked[0]

    # All of the prompt is 3 s. Twice the mean is no overload here, as it was once; more than 3 s above it is.
    assert first(1.0) == first(5.9) == 0
    assert first(6.1) == 1


def test_prefix_leaves_a_replica_that_was_given_more_than_its_share_though_it_is_idle() -> None:
    def first(given_s: float) -> int:
        view = view_of(4, cached_tokens=[0, 2944, 0, 0], given_s=[10.0, given_s, 10.0, 10.0])
        return choose_replica("prefix", request_of(tokens=3000), view, OPTIONS).ranked[0]

    # It holds most of the prompt of 3.03 s, and needs 0.06 s: 1.1 (30 + x) / 4 + 3.03 = x + 0.06 at x = 15.5.
    assert first(15.3) == 1
    assert first(15.7) != 1


def test_where_all_have_had_their_share_a_new_prompt_goes_to_who_had_least() -> None:
    for number in range(8):
        view = view_of(4, given_s=[9.0, 9.1, 8.9, 9.2])
        assert choose_replica("prefix", request_of(tokens=3000, anchor=f"{number}"), view, OPTIONS).ranked[0] == 2


def test_new_prefixes_go_by_rendezvous_the_same_in_all_routers() -> None:
    names = [f"prompt {i}" for i in range(400)]
    one = [choose_replica("prefix", request_of(anchor=n), view_of(8, draw=1), OPTIONS).ranked[0] for n in names]
    two = [choose_replica("prefix", request_of(anchor=n), view_of(8, draw=2), OPTIONS).ranked[0] for n in names]
    assert one == two
    counts = np.bincount(one, minlength=8)
    assert counts.min() > 25
    assert counts.max() < 85


def test_a_ninth_replica_moves_a_ninth_of_the_prefixes() -> None:
    names = [f"prompt {i}" for i in range(900)]
    eight = [choose_replica("prefix", request_of(anchor=n), view_of(8), OPTIONS).ranked[0] for n in names]
    nine = [choose_replica("prefix", request_of(anchor=n), view_of(9), OPTIONS).ranked[0] for n in names]
    moved = [new for old, new in zip(eight, nine, strict=True) if old != new]
    assert set(moved) == {8}
    assert 50 < len(moved) < 160


def test_eight_in_place_of_four_take_half_of_the_prefixes() -> None:
    names = [f"prompt {i}" for i in range(800)]
    four = [choose_replica("prefix", request_of(anchor=n), view_of(4), OPTIONS).ranked[0] for n in names]
    eight = [choose_replica("prefix", request_of(anchor=n), view_of(8), OPTIONS).ranked[0] for n in names]
    moved = [new for old, new in zip(four, eight, strict=True) if old != new]
    assert set(moved) == {4, 5, 6, 7}, "none moves between those that stay"
    assert len(moved) == pytest.approx(400, abs=60)


def test_prompts_without_a_full_chunk_spread_at_random() -> None:
    firsts = {
        choose_replica("prefix", request_of(tokens=20), view_of(4, draw=i * 7919 << 20), OPTIONS).ranked[0]
        for i in range(40)
    }
    assert firsts == {0, 1, 2, 3}


def test_a_new_replica_gets_its_share_of_cold_prefixes_bit_by_bit() -> None:
    def share(age_s: float) -> float:
        views = [
            view_of(4, age_s=[np.inf, np.inf, np.inf, age_s], draw=i * 0x9E3779B97F4A7C15 % 2**64) for i in range(300)
        ]
        firsts = [
            choose_replica("prefix", request_of(anchor=f"p{i}"), view, OPTIONS).ranked[0]
            for i, view in enumerate(views)
        ]
        return firsts.count(3) / 300

    assert share(0.0) == 0.0
    assert 0.0 < share(10.0) < share(60.0)
    assert share(60.0) > 0.15


def test_a_new_replica_serves_what_it_holds() -> None:
    view = view_of(3, age_s=[np.inf, np.inf, 0.0], cached_tokens=[0, 0, 640])
    assert choose_replica("prefix", request_of(), view, OPTIONS).ranked[0] == 2


def test_a_decoding_stream_takes_a_token_of_each_step_as_well() -> None:
    cost = view_of(2, per_sequence_s=5e-4).cost
    # Ten tokens, each 1 ms as a token and 0.5 ms as a sequence, for itself and for three beside it.
    assert cost.decode_s(10, np.array([0.0, 3.0])).tolist() == pytest.approx([0.015, 0.060])


def test_slower_replicas_cost_more() -> None:
    view = view_of(2)
    view = dataclasses.replace(view, cost=dataclasses.replace(view.cost, per_token_s=np.array([4e-3, 1e-3])))
    for anchor in "abcdefgh":
        assert choose_replica("prefix", request_of(anchor=anchor), view, OPTIONS).ranked[0] == 1


def test_full_memory_costs_what_must_be_computed_again() -> None:
    for anchor in "abcdefgh":
        view = view_of(2, free_tokens=[0.0, 5000.0])
        assert choose_replica("prefix", request_of(anchor=anchor), view, OPTIONS).ranked[0] == 1


def test_decoding_beside_sharers_is_worth_waiting_for() -> None:
    # Both hold the prompt; the one where others decode over it reads its chunks once for all.
    view = view_of(2, per_context_s=1e-6, cached_tokens=[960, 960], num_sharers=[0, 3], work_s=[0.0, 0.03])
    assert choose_replica("prefix", request_of(), view, OPTIONS).ranked[0] == 1
    without = dataclasses.replace(OPTIONS, cost=dataclasses.replace(OPTIONS.cost, sharing_weight=0.0))
    assert choose_replica("prefix", request_of(), view, without).ranked[0] == 0


def test_crowded_batches_cost_decode_time() -> None:
    view = view_of(2, per_sequence_s=1e-3, num_requests=[40, 2], work_s=[0.0, 0.05])
    assert choose_replica("prefix", request_of(), view, OPTIONS).ranked[0] == 1


def test_round_robin_takes_turns() -> None:
    firsts = [choose_replica("round_robin", request_of(), view_of(3, turn=i), OPTIONS).ranked[0] for i in range(6)]
    assert firsts == [0, 1, 2, 0, 1, 2]


def test_power_of_two_takes_the_emptier_of_two() -> None:
    counts = [5, 1, 9]
    for draw in range(200):
        ranked = choose_replica(
            "power_of_two", request_of(), view_of(3, num_requests=counts, draw=draw << 31), OPTIONS
        ).ranked
        assert len(ranked) == 2
        assert counts[ranked[0]] < counts[ranked[1]]


def test_least_loaded_goes_by_seconds() -> None:
    view = view_of(3, work_s=[2.0, 0.5, 1.0], num_requests=[1, 9, 2])
    assert choose_replica("least_loaded", request_of(), view, OPTIONS).ranked == (1, 2, 0)


def test_bounded_hash_overflows_to_the_next_in_its_order() -> None:
    request = request_of(anchor="a")
    free = choose_replica("bounded_hash", request, view_of(4), OPTIONS).ranked
    counts = [2] * 4
    counts[free[0]] = 30
    assert choose_replica("bounded_hash", request, view_of(4, num_requests=counts), OPTIONS).ranked[0] == free[1]


def test_threshold_follows_sglangs_rule() -> None:
    matched = {"cached_tokens": [0, 640, 0]}
    assert choose_replica("threshold", request_of(), view_of(3, **matched), OPTIONS).ranked[0] == 1
    few = view_of(3, cached_tokens=[0, 320, 0], num_requests=[3, 4, 1])
    assert choose_replica("threshold", request_of(), few, OPTIONS).ranked[0] == 2
    imbalanced = view_of(3, **matched, num_requests=[10, 43, 10])
    assert choose_replica("threshold", request_of(), imbalanced, OPTIONS).ranked[0] != 1
    balanced = view_of(3, **matched, num_requests=[10, 42, 10])
    assert choose_replica("threshold", request_of(), balanced, OPTIONS).ranked[0] == 1


def test_product_weighs_new_tokens_by_batch_size() -> None:
    view = view_of(2, cached_tokens=[640, 0], num_requests=[9, 1])
    assert choose_replica("product", request_of(), view, OPTIONS).ranked[0] == 1
    view = view_of(2, cached_tokens=[960, 0], num_requests=[9, 1])
    assert choose_replica("product", request_of(), view, OPTIONS).ranked[0] == 0
