"""Which replica gets a request: pure functions over a view of the cluster, all policies under their names."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from .cost import CostModel, CostOptions, eviction_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Why the first of the ranked replicas is the first.
Reason = Literal["affinity", "spill", "bound", "cold", "load", "draw", "hash", "degraded"]

# More than this many alternatives are of no use to Serve.
_NUM_RANKED = 8
# What a replica may be sent whatever its share is, in prompts.
_FREE_PROMPTS = 2.0
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PolicyError(ValueError):
    """No such policy, or an option that it does not have; the message lists what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a policy may know of a request.

    output_tokens: how many are expected.
    anchor: digest that names the prefix to gather around: the first chunk that not everybody holds; b"" if the prompt
        has no such chunk.
    head: digest of the prompt's first chunks, for policies that hash a fixed length; b"" for a short prompt.
    """

    prompt_tokens: int
    output_tokens: int
    anchor: bytes = b""
    head: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The replicas that may get the request, at one moment; all arrays are [N], N at least 1.

    seeds: a fixed number per replica, the same in all routers.
    work_s: seconds until its prompts are computed.
    given_s: seconds of prompts that it was given lately, done or not.
    num_requests: requests that it has.
    cached_tokens: tokens of this prompt that it holds.
    num_sharers: running requests there with the request's anchor.
    free_tokens: tokens of KV memory that are not in use and not retained.
    age_s: since it joined.
    draw: a random number below 2**64; turn: rises by one per request.
    """

    seeds: NDArray[np.uint64]
    work_s: Floats
    given_s: Floats
    num_requests: Ints
    cached_tokens: Ints
    num_sharers: Ints
    free_tokens: Floats
    age_s: Floats
    cost: CostModel
    draw: int
    turn: int

    def __len__(self) -> int:
        return len(self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Knobs of the policies; each reads its own.

    overload: `prefix` keeps replicas with more than (1 + overload) x mean work out, ...
    overload_floor_s: ... unless they have less work than this, or no more above the mean than computing all of the
        prompt takes: of two replicas with one idle, any work is twice the mean.
    balance: `prefix` also keeps those out that, with the request, would have been sent more than (1 + balance) x the
        mean lately, or two such prompts, and half a prompt beyond that (a whole one if they hold most of it): hot
        prefixes are computed once more, elsewhere.
    tie_s, tie_share: costs this close to the best are equal, in seconds and as a share of the best.
    slow_start_s: a new replica takes over its share of cold prefixes within this time.
    match_share, imbalance_requests, imbalance_ratio: `threshold`: the share of the prompt that must match, and the
        difference and the ratio of request counts from which balance goes first.
    load_factor: `bounded_hash`: most requests, over the mean.
    """

    overload: float = 0.5
    overload_floor_s: float = 0.25
    balance: float = 0.1
    tie_s: float = 0.002
    tie_share: float = 0.02
    slow_start_s: float = 30.0
    match_share: float = 0.5
    imbalance_requests: int = 32
    imbalance_ratio: float = 1.1
    load_factor: float = 1.25
    cost: CostOptions = field(default_factory=CostOptions)


_OPTIONS = TypeAdapter(PolicyOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Replicas, best first, as positions in the view; and why the first."""

    ranked: tuple[int, ...]
    reason: Reason


Policy = Callable[[RouteRequest, ClusterView, PolicyOptions], Choice]


def policy_options(fields: Mapping[str, Any]) -> PolicyOptions:
    """PolicyOptions out of plain JSON; those of CostOptions stand under `cost`.

    Raises:
        ValueError: an option that there is not, or a wrong value.
    """
    cost = fields.get("cost", {})
    for given, known in ((fields, PolicyOptions), (cost, CostOptions)):
        if unknown := set(given) - set(known.__dataclass_fields__):
            names = ", ".join(known.__dataclass_fields__)
            raise ValueError(f"routing_options: no option {', '.join(sorted(unknown))}; expected some of {names}")
    return _OPTIONS.validate_python(dict(fields))


def choose_replica(policy: str, request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """Rank the replicas of the view for a request.

    Raises:
        PolicyError: no policy has this name.
    """
    try:
        chosen = POLICIES[policy]
    except KeyError:
        raise PolicyError(f"routing_policy is {policy!r}; expected one of {', '.join(POLICIES)}") from None
    return chosen(request, view, options)


def prefix(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """Fewest expected seconds, for the request and for those that run beside it, among replicas without overload.

    Ties go by rendezvous hashing of the anchor, so routers that do not talk send one new prefix to one replica.
    """
    cached = view.cached_tokens.astype(np.float64)
    weights = options.cost
    new_tokens = request.prompt_tokens + request.output_tokens - cached
    prefill_s = view.cost.prefill_s(request.prompt_tokens, cached)
    seconds = (
        view.work_s
        + (1 + weights.prefill_weight) * prefill_s
        + weights.decode_weight * view.cost.decode_s(request.output_tokens, view.num_requests.astype(np.float64))
        + eviction_s(view.cost, weights, new_tokens, view.free_tokens)
        - weights.sharing_weight
        * view.cost.sharing_s(request.output_tokens, np.where(view.num_sharers > 0, cached, 0.0))
    )
    mean_s = float(view.work_s.mean())
    prompt_s = view.cost.prefill_s(request.prompt_tokens, np.zeros(len(view)))
    limit_s = np.maximum(options.overload_floor_s, mean_s + np.maximum(options.overload * mean_s, prompt_s))
    allowed = view.work_s <= limit_s
    # What holds the prompt may be asked for it again after what has just been allowed to compute it.
    slack_s = np.where(prefill_s > 0.5 * prompt_s, 0.5, 1.0) * prompt_s
    share_s = np.maximum((1 + options.balance) * float(view.given_s.mean()), _FREE_PROMPTS * prompt_s)
    fair = view.given_s + prefill_s <= share_s + slack_s
    allowed &= fair if fair.any() else view.given_s == view.given_s.min()
    random_key = view.draw.to_bytes(8, "little")
    priorities = _rendezvous(request.anchor or random_key, view.seeds)
    warming = view.age_s < options.slow_start_s
    if warming.any() and not warming.all():
        # Its share of the prefixes grows with its age; what it already holds it may serve.
        share = _rendezvous(random_key, view.seeds).astype(np.float64) / 2.0**64
        held_back = warming & (view.cached_tokens == 0) & (share >= view.age_s / options.slow_start_s)
        allowed &= ~held_back
    if not allowed.any():
        allowed[:] = True
    capped = np.where(allowed, seconds, np.inf)
    best_s = float(capped.min())
    ties = capped <= best_s + max(options.tie_s, options.tie_share * abs(best_s))
    # Priorities are 64 bits, more than a float holds: their ranks among the ties are exact.
    order = np.lexsort((~priorities, np.where(ties, -np.inf, seconds), ~allowed))
    first = int(order[0])
    deepest = int(view.cached_tokens.max())
    reason: Reason = "cold" if deepest == 0 else "affinity" if view.cached_tokens[first] == deepest else "spill"
    if reason == "spill" and not allowed[int(np.argmin(seconds))]:
        reason = "bound"
    return Choice(ranked=_ranked(order), reason=reason)


def random_(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """Anywhere."""
    return Choice(ranked=_rotated(view.draw, len(view)), reason="draw")


def round_robin(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """One after the other."""
    return Choice(ranked=_rotated(view.turn, len(view)), reason="draw")


def power_of_two(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """Of two random ones the one with fewer requests (Ray Serve's default)."""
    n = len(view)
    one = view.draw % n
    other = (one + 1 + (view.draw >> 32) % (n - 1)) % n if n > 1 else one
    if view.num_requests[other] < view.num_requests[one]:
        one, other = other, one
    return Choice(ranked=tuple(dict.fromkeys((one, other))), reason="load")


def least_loaded(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """Least work in seconds; of equals the one with fewer requests."""
    order = np.lexsort((_rendezvous(view.draw.to_bytes(8, "little"), view.seeds), view.num_requests, view.work_s))
    return Choice(ranked=_ranked(order), reason="load")


def bounded_hash(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """By hash of the first chunks, with bounded loads (Mirrokni et al.; KubeAI, smg's prefix_hash)."""
    key = request.head or view.draw.to_bytes(8, "little")
    bound = math.ceil(options.load_factor * (int(view.num_requests.sum()) + 1) / len(view))
    order = np.lexsort((~_rendezvous(key, view.seeds), view.num_requests + 1 > bound))
    return Choice(ranked=_ranked(order), reason="hash")


def threshold(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """SGLang's rule: fewest requests if counts differ much or too little of the prompt matches, else longest match."""
    counts = view.num_requests
    low, high = int(counts.min()), int(counts.max())
    imbalanced = high - low > options.imbalance_requests and high > options.imbalance_ratio * low
    tie_break = _rendezvous(view.draw.to_bytes(8, "little"), view.seeds)
    matched = float(view.cached_tokens.max()) / request.prompt_tokens
    if imbalanced or matched <= options.match_share:
        return Choice(ranked=_ranked(np.lexsort((tie_break, counts))), reason="load")
    return Choice(ranked=_ranked(np.lexsort((tie_break, counts, -view.cached_tokens))), reason="affinity")


def product(request: RouteRequest, view: ClusterView, options: PolicyOptions) -> Choice:
    """Fewest new prompt tokens times batch size (LMetric, arXiv 2603.15202); new tokens include those that wait."""
    waiting = view.work_s / view.cost.per_token_s
    new = np.maximum(request.prompt_tokens - view.cached_tokens, 1) + waiting
    order = np.lexsort((_rendezvous(view.draw.to_bytes(8, "little"), view.seeds), new * (view.num_requests + 1)))
    first = int(order[0])
    deepest = int(view.cached_tokens.max())
    return Choice(
        ranked=_ranked(order),
        reason="cold" if deepest == 0 else "affinity" if view.cached_tokens[first] == deepest else "spill",
    )


POLICIES: Mapping[str, Policy] = {
    "prefix": prefix,
    "random": random_,
    "round_robin": round_robin,
    "power_of_two": power_of_two,
    "least_loaded": least_loaded,
    "bounded_hash": bounded_hash,
    "threshold": threshold,
    "product": product,
}


def _ranked(order: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(order[:_NUM_RANKED].tolist())


def _rotated(begin: int, n: int) -> tuple[int, ...]:
    return tuple((begin + i) % n for i in range(min(n, _NUM_RANKED)))


def _rendezvous(key: bytes, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each replica's priority for a key: highest random weight, the same in every router (splitmix64's finish)."""
    x = seeds ^ np.uint64(int.from_bytes(key[:8], "little"))
    x = (x + _GOLDEN) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) * _GOLDEN
    return x ^ (x >> np.uint64(29))
