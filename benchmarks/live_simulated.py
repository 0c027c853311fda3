"""The simulator on what a live arm was asked: equal prompts and arrivals, costs fitted from the live run."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.protocol import StepTime
from chunkserve.router.simulated_replica import SimConfig, SimRequest
from chunkserve.router.simulator import SimResult, Simulator
from live_arms import Arm, Ask


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Costs of a live server. transit_s: between client and engine, one way."""

    step: StepTime
    transit_s: float


def simulated(
    arm: Arm, begin_s: float, fit: Fit, *, replicas: int, chunk_size: int, chunks: int, max_step_tokens: int
) -> SimResult:
    """Serve an arm's requests in the simulator; begin_s: of the measured ones, after the first of the warm-up."""
    scheme = ChunkScheme(model="simulated", dtype="auto", chunk_size=chunk_size)
    heads = _head_tokens([*arm.warmup, *arm.asks])
    config = SimConfig(
        policy=arm.policy,
        num_replicas=replicas,
        chunk_size=chunk_size,
        chunks_per_replica=chunks,
        step=fit.step,
        max_step_tokens=max_step_tokens,
        transit_s=fit.transit_s,
        seed=arm.seed,
    )

    def request(ask: Ask, offset_s: float, is_warmup: bool) -> SimRequest:
        return SimRequest(
            at_s=offset_s + ask.at_s,
            prompt_tokens=len(ask.token_ids),
            output_tokens=ask.output_tokens,
            digests=scheme.digests("", ask.token_ids),
            head=f"prompt {ask.prompt}".encode(),
            head_tokens=heads[ask.prompt],
            is_warmup=is_warmup,
        )

    # The first reports have come before any request, as they have in a server that runs.
    start_s = 2.0
    warmup = [request(ask, start_s, True) for ask in arm.warmup]
    asks = [request(ask, start_s + begin_s, False) for ask in arm.asks]
    return Simulator(config).run([*warmup, *asks])


def fitted_transit_s(
    live_medians_s: Sequence[float], simulate: Callable[[float], Sequence[SimResult]], *, longest_s: float = 0.25
) -> float:
    """One way between client and engine with which the simulator's median times to the first token are the live ones.

    Args:
        live_medians_s: of some runs.
        simulate: the same runs with a given way.
        longest_s: a way that is too long.
    """
    low, high = 0.0, longest_s
    for _ in range(9):
        middle = (low + high) / 2
        excess_s = sum(statistics.median(result.ttft_s) for result in simulate(middle)) - sum(live_medians_s)
        low, high = (low, middle) if excess_s > 0 else (middle, high)
    return (low + high) / 2


def _head_tokens(asks: Sequence[Ask]) -> dict[int, int]:
    """By prompt: tokens that all who ask with it have in common."""
    common: dict[int, list[int]] = {}
    for ask in asks:
        before = common.setdefault(ask.prompt, ask.token_ids)
        differ = (at for at, (one, other) in enumerate(zip(before, ask.token_ids, strict=False)) if one != other)
        common[ask.prompt] = before[: next(differ, min(len(before), len(ask.token_ids)))]
    return {prompt: len(tokens) for prompt, tokens in common.items()}
