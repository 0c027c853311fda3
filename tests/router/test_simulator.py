"""The simulator, and through it the situations of the router's design: many replicas, routers, faults."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from chunkserve.replica.protocol import StepTime
from chunkserve.router.policy import POLICIES, PolicyOptions
from chunkserve.router.simulated_replica import SimConfig, SimRequest
from chunkserve.router.simulator import SimResult, Simulator
from chunkserve.router.workloads import digest_of, merged, mooncake, shared_prompts, unshared

TRACE = Path(__file__).parents[2] / "../shared/traces/mooncake/conversation_trace.jsonl"
CONFIG = SimConfig(
    policy="prefix",
    num_replicas=8,
    chunk_size=64,
    chunks_per_replica=200,
    step=StepTime(fixed_s=0.005, per_token_s=2e-4, per_sequence_s=1e-4),
)
# Twelve prompts of about 1,300 tokens; a cache of 200 chunks holds nine of them.
PROMPTS = [500 + 150 * i for i in range(12)]


def prompts_of(num_requests: int, rate_rps: float, **changes: object) -> list[SimRequest]:
    return shared_prompts(PROMPTS, num_requests=num_requests, rate_rps=rate_rps, chunk_size=64, **changes)


def run(workload: list[SimRequest], **changes: object) -> SimResult:
    sim = Simulator(replace(CONFIG, **changes))
    result = sim.run(workload)
    assert len(result.finished_at_s) + result.rejected + result.failed + result.cancelled == len(workload)
    for router in sim.routers:
        router.check()
        assert router.num_open == router.loads.num_open == 0
    return result


def test_times_are_those_of_the_model() -> None:
    a = SimRequest(at_s=1.0, prompt_tokens=130, output_tokens=11, digests=(digest_of("1"), digest_of("2")))
    b = replace(a, at_s=100.0)
    result = run([a, b], num_replicas=1, max_step_tokens=65)
    # Two steps for 130 tokens; one step for the two that are not cached.
    assert result.ttft_s == pytest.approx([2 * (0.005 + 1e-4) + 130 * 2e-4, 0.005 + 1e-4 + 2 * 2e-4])
    assert result.token_s == pytest.approx([0.005 + 3e-4] * 2)
    assert (result.cached_tokens, result.prompt_tokens) == (128, 260)


def alone(name: str, at_s: float, tokens: int = 10, output_tokens: int = 1, **changes: object) -> SimRequest:
    """A request that shares nothing."""
    digests = tuple(digest_of(f"{name} {i}") for i in range(tokens // 64))
    return replace(SimRequest(at_s=at_s, prompt_tokens=tokens, output_tokens=output_tokens, digests=digests), **changes)


# One replica, whose steps take 10 ms whatever is in them.
STEADY = {"num_replicas": 1, "step": StepTime(fixed_s=0.01, per_token_s=0.0)}


def test_a_newcomer_waits_for_the_step_that_is_under_way_and_no_longer() -> None:
    result = run([alone("a", 0.0, output_tokens=100), alone("b", 0.034)], **STEADY)
    assert result.ttft_s == pytest.approx([0.010, 0.016])
    assert result.token_s == pytest.approx([0.010])


def test_prompts_that_wait_share_a_step_as_far_as_its_budget_goes() -> None:
    waiting = [alone(name, 0.005, 60) for name in "bcd"]
    result = run([alone("a", 0.0), *waiting], max_step_tokens=120, **STEADY)
    assert result.ttft_s == pytest.approx([0.010, 0.015, 0.015, 0.025])


def test_who_shares_a_prefix_that_is_being_computed_waits_for_it() -> None:
    result = run([alone("a", 0.0, 128), alone("a", 0.001, 128), alone("b", 0.002, 30)], max_step_tokens=64, **STEADY)
    # In steps of 64: a, a; then one token of the second a, and b.
    assert result.ttft_s == pytest.approx([0.020, 0.029, 0.028])
    assert result.cached_tokens == 127


def test_a_hit_ends_within_a_chunk_where_prompts_part() -> None:
    a = alone("a", 0.0, 140, head=b"h", head_tokens=100)
    b = alone("b", 1.0, 140, head=b"h", head_tokens=100)
    b = replace(b, digests=(a.digests[0], b.digests[1]))
    assert run([a, b], **STEADY).cached_tokens == 100
    assert run([a, replace(b, head=b"other")], **STEADY).cached_tokens == 64
    assert run([a, alone("c", 1.0, 140, head=b"h", head_tokens=100)], **STEADY).cached_tokens == 0


def test_transit_counts_and_warm_ups_do_not() -> None:
    warmup = alone("a", 0.0, 128, is_warmup=True)
    result = run([warmup, alone("a", 1.0, 128)], transit_s=0.003, **STEADY)
    assert result.ttft_s == pytest.approx([0.016])
    assert (result.cached_tokens, result.prompt_tokens) == (127, 128)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everything_and_equal_seeds_repeat(policy: str) -> None:
    workload = prompts_of(300, 20.0)
    one, two = run(workload, policy=policy), run(workload, policy=policy)
    assert one.ttft_s == two.ttft_s
    assert len(one.finished_at_s) == 300


def test_prefix_beats_the_others_near_saturation() -> None:
    workload = prompts_of(2500, 150.0)
    results = {policy: run(workload, policy=policy) for policy in ("prefix", "threshold", "least_loaded", "random")}
    means = {policy: result.ttft_s_mean for policy, result in results.items()}
    assert means["prefix"] < 0.6 * means["threshold"]
    assert means["prefix"] < 0.25 * min(means["random"], means["least_loaded"])
    assert results["prefix"].max_over_mean_work < 1.3


def test_without_sharing_it_is_as_good_as_least_loaded() -> None:
    workload = unshared(num_requests=3000, rate_rps=28.0, chunk_size=64)
    least = run(workload, policy="least_loaded")
    assert run(workload).ttft_s_mean < 1.02 * least.ttft_s_mean


def test_one_prompt_for_all_does_not_crowd_one_replica() -> None:
    workload = prompts_of(3000, 100.0, common_tokens=1280, zipf=0.0)
    workload = [replace(request, digests=request.digests[:20]) for request in workload]
    sim = Simulator(CONFIG)
    result = sim.run(workload)
    assert result.max_over_mean_work < 1.3
    assert result.hit_rate > 0.4
    common = workload[0].digests[:20]
    assert all(set(common) <= set(replica.cache) for replica in sim.replicas.values()), "it is everywhere in the end"


def test_16_routers_with_late_news_keep_the_hit_rate() -> None:
    workload = prompts_of(3000, 60.0)
    one = run(workload)
    many = run(workload, num_routers=16, report_period_s=1.0, report_delay_s=0.1)
    assert many.hit_rate > 0.95 * one.hit_rate
    assert max(one.max_over_mean_work, many.max_over_mean_work) < 1.3


def test_16_routers_do_not_all_send_to_who_last_said_to_be_idle() -> None:
    """Of 20 requests that a replica gets between its reports a router knows one or two; all choose alike."""
    workload = prompts_of(3000, 300.0)
    cluster = {"num_replicas": 16, "step": StepTime(fixed_s=0.008, per_token_s=1e-4, per_sequence_s=1e-4)}
    one = run(workload, **cluster)
    many = run(workload, num_routers=16, report_period_s=1.0, report_delay_s=0.1, **cluster)
    assert many.ttft_s_mean < 3 * one.ttft_s_mean, "4.4 times, were the others left out"


def test_four_routers_do_not_pile_one_burst_on_one_replica() -> None:
    burst = [replace(request, at_s=1.0) for request in unshared(num_requests=64, rate_rps=1.0, chunk_size=64)]
    result = run(burst, num_routers=4)
    assert max(result.routed.values()) <= 3 * 64 / 8


def test_four_routers_do_not_pile_a_burst_with_one_new_prefix_on_one_replica() -> None:
    """Each knows of its own quarter only, until the first reports come."""
    workload = shared_prompts([2000], num_requests=200, rate_rps=1.0, chunk_size=64)
    workload = [replace(request, at_s=1.0) for request in workload]
    one, four = run(workload), run(workload, num_routers=4)
    assert max(four.ttft_s) <= max(one.ttft_s) + CONFIG.report_period_s
    assert len([name for name, count in four.routed.items() if count]) >= 4
    assert max(four.routed.values()) <= 200 / 3


def test_a_burst_with_one_new_prefix_computes_it_about_once() -> None:
    workload = shared_prompts([2000], num_requests=16, rate_rps=1.0, chunk_size=64)
    workload = [replace(request, at_s=1.0) for request in workload]
    result = run(workload, step=StepTime(fixed_s=0.001, per_token_s=2e-5))
    alone = run(workload, step=StepTime(fixed_s=0.001, per_token_s=2e-5), num_replicas=1)
    assert result.prompt_tokens - result.cached_tokens <= 1.2 * (alone.prompt_tokens - alone.cached_tokens)


def test_evictions_are_heard_of() -> None:
    result = run(prompts_of(3000, 40.0, zipf=0.0), chunks_per_replica=60, report_period_s=0.25)
    assert result.stale_hits < 0.02 * 3000


def test_a_killed_replica_costs_no_request_that_has_no_token_and_leaves_no_load() -> None:
    workload = prompts_of(2000, 220.0)
    sim = Simulator(CONFIG)
    streams: list[int] = []
    sim.at(6.0, lambda: streams.append(sum(job.generated > 0 for job in sim.replicas["replica-3"].running)))
    sim.at(6.0, sim.kill_replica, "replica-3")
    result = sim.run(workload)
    assert result.retried > 0
    assert [result.failed] == streams
    assert len(result.finished_at_s) == 2000 - result.failed
    for router in sim.routers:
        router.check()
        assert router.loads.num_open == 0
        assert "replica-3" not in router.replica_names


def test_a_restarted_replica_does_not_get_all_new_traffic() -> None:
    workload = unshared(num_requests=2000, rate_rps=34.0, chunk_size=64)
    sim = Simulator(CONFIG)
    sim.at(20.0, sim.kill_replica, "replica-3")
    counts: list[Counter[str]] = []

    def join() -> None:
        counts.append(Counter(sim.result.routed))
        sim.add_replica("replica-new")

    sim.at(30.0, join)
    sim.at(34.0, lambda: counts.append(Counter(sim.result.routed)))
    sim.at(50.0, lambda: counts.append(Counter(sim.result.routed)))
    sim.run(workload)
    early, late = counts[1] - counts[0], counts[2] - counts[1]
    assert early["replica-new"] < early.total() / 8
    assert late["replica-new"] > late.total() / 16


def test_a_cleared_cache_is_noticed() -> None:
    workload = prompts_of(3000, 40.0)
    sim = Simulator(CONFIG)
    for name in [f"replica-{i}" for i in range(8)]:
        sim.at(30.0, sim.clear_replica, name)
    result = sim.run(workload)
    assert result.stale_hits < 0.02 * 3000
    assert len(result.finished_at_s) == 3000


def test_drained_replicas_get_no_new_prefixes_and_finish_what_they_have() -> None:
    workload = prompts_of(1500, 60.0)
    sim = Simulator(CONFIG)
    held: list[int] = []

    def drain() -> None:
        sim.drain_replica("replica-0")
        replica = sim.replicas["replica-0"]
        held.append(len(replica.running) + len(replica.waiting))

    sim.at(10.0, drain)
    before: Counter[str] = Counter()
    heard_s = 10.0 + CONFIG.report_period_s + CONFIG.report_delay_s
    sim.at(heard_s, lambda: before.update(sim.result.routed))
    # Prompts that nobody has seen before.
    new = shared_prompts(PROMPTS, num_requests=500, rate_rps=40.0, chunk_size=64, seed=99)
    new = [replace(request, at_s=heard_s + request.at_s) for request in new]
    result = sim.run(merged(workload, new))
    assert held[0] > 0
    assert result.routed["replica-0"] == before["replica-0"] > 0
    assert len(result.finished_at_s) == 2000


def test_drained_replicas_get_no_more() -> None:
    workload = prompts_of(1500, 40.0)
    sim = Simulator(CONFIG)
    sim.at(10.0, sim.drain_replica, "replica-0")
    before: Counter[str] = Counter()
    sim.at(12.0, lambda: before.update(sim.result.routed))
    result = sim.run(workload)
    assert result.routed["replica-0"] == before["replica-0"] > 0


def test_scaling_up_and_down_under_load_loses_nothing() -> None:
    workload = prompts_of(4000, 120.0)
    sim = Simulator(replace(CONFIG, num_replicas=4))
    for i in range(4):
        sim.at(5.0, sim.add_replica, f"more-{i}")
        sim.at(25.0, sim.drain_replica, f"more-{i}")
    result = sim.run(workload)
    assert len(result.finished_at_s) == 4000
    assert result.hit_rate > 0.5
    assert all(result.work_s[f"more-{i}"] > 0 for i in range(4))


def test_hits_recover_within_seconds_of_scaling_from_4_to_8_and_back() -> None:
    workload = prompts_of(3600, 60.0, zipf=0.0)
    sim = Simulator(replace(CONFIG, num_replicas=4, options=PolicyOptions(slow_start_s=10.0)))
    seen: list[tuple[float, int, int]] = []

    def look() -> None:
        seen.append((sim.now_s, sim.result.prompt_tokens, sim.result.cached_tokens))

    for at_s in (10.0, 20.0, 30.0, 40.0, 50.0, 58.0):
        sim.at(at_s, look)
    for i in range(4):
        sim.at(20.0, sim.add_replica, f"more-{i}")
        sim.at(40.0, sim.drain_replica, f"more-{i}")
        # Two seconds later they are idle, and go.
        sim.at(50.0, sim.kill_replica, f"more-{i}")
    result = sim.run(workload)
    assert len(result.finished_at_s) == 3600
    assert result.failed == result.retried == 0
    four, growing, eight, shrinking, back = (
        (cached - cached_before) / (prompt - prompt_before)
        for (_, prompt_before, cached_before), (_, prompt, cached) in pairwise(seen)
    )
    assert min(eight, back) > 0.95 * four, "ten seconds later all is as it was"
    assert min(growing, shrinking) > 0.85 * four, "and before that not far from it"


def test_cancels_at_any_time_leave_no_load() -> None:
    workload = prompts_of(3000, 90.0)
    sim = Simulator(CONFIG)
    for number, request in enumerate(workload):
        if number % 3:
            sim.at(request.at_s + (number % 17) * 0.05, sim.cancel, f"request-{number}")
    result = sim.run(workload)
    assert result.cancelled > 500
    router = sim.routers[0]
    router.check()
    assert router.loads.num_open == router.num_open == 0
    assert not router.loads._own_us.any()
    assert not router.loads._in_flight.any()


def test_a_flood_of_long_prompts_is_bounded_for_others() -> None:
    calm = prompts_of(1000, 30.0)
    flood = unshared(num_requests=60, rate_rps=3.0, chunk_size=64, prompt_tokens=8000, begin_s=5.0, name="flood")
    both = list(merged(calm, flood))
    assert run(both).ttft_s_at(0.95) < 0.7 * run(both, policy="power_of_two").ttft_s_at(0.95)


def test_full_queues_refuse_and_are_counted() -> None:
    result = run(prompts_of(500, 2000.0), max_waiting=5)
    assert result.rejected > 0
    assert len(result.finished_at_s) == 500 - result.rejected


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not beside the repository")
def test_mooncakes_conversations() -> None:
    workload = mooncake(TRACE, limit=4000)
    assert len({request.digests[0] for request in workload if request.digests}) == 1
    rate = sum(request.prompt_tokens for request in workload) / workload[-1].at_s / 8
    config = replace(
        CONFIG,
        chunk_size=512,
        chunks_per_replica=1500,
        step=StepTime(fixed_s=0.0, per_token_s=1 / rate),
        decode_token_s=0.02,
        max_step_tokens=1_000_000,
    )
    results = {policy: Simulator(replace(config, policy=policy)).run(workload) for policy in ("prefix", "threshold")}
    assert results["prefix"].ttft_s_mean < 0.7 * results["threshold"].ttft_s_mean
    assert results["prefix"].max_over_mean_work < 1.3
