"""What a router counts and measures, for metrics."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from .policy import Reason

_MAX_SAMPLES = 10_000


@dataclass(slots=True)
class RouteCounters:
    """Totals since the start, for metrics."""

    decisions: dict[Reason, int] = field(default_factory=dict)
    faults: int = 0
    predicted_cached_tokens: int = 0
    actual_cached_tokens: int = 0
    prediction_error_tokens: int = 0
    prompt_tokens: int = 0
    stale_hits: int = 0
    first_tokens: int = 0
    chunked_first_tokens: int = 0  # of those, prompts that have a full chunk
    gaps: int = 0
    resyncs: int = 0
    retries: Counter[Literal["before", "after"]] = field(default_factory=Counter)  # the first token
    broken_streams: int = 0
    cancels: int = 0
    actual_s: float = 0.0  # from the decision to the first token
    time_error_s: float = 0.0  # and how far that was from what was expected


@dataclass(slots=True)
class RouteSamples:
    """What was measured since somebody took it away; the oldest are lost if nobody does.

    decision_s: of choosing.
    regret_s: actual time to the first token beyond what the best other replica was expected to take, at least 0.
    """

    decision_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    regret_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))


@dataclass(frozen=True, slots=True, kw_only=True)
class HottestPrefix:
    """The prefix that most open requests gather around: replicas that hold it, and its share of those requests."""

    copies: int
    share: float
