"""Seconds that a request would cost on each replica."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What replicas' steps cost, one entry per replica; see StepTime of replica/protocol.py.

    All [rows]. max_step_tokens: a longer prompt takes several steps.
    """

    fixed_s: Floats
    per_token_s: Floats
    per_context_s: Floats
    per_sequence_s: Floats
    max_step_tokens: Floats

    def prefill_s(self, prompt_tokens: int, cached_tokens: Floats) -> Floats:
        """Computing what is not cached of a prompt, at least one token: fixed + b u + d u c over its steps."""
        new = np.maximum(prompt_tokens - cached_tokens, 1.0)
        steps = np.ceil(new / self.max_step_tokens)
        context = cached_tokens + 0.5 * new
        return self.fixed_s * steps + (self.per_token_s + self.per_context_s * context) * new

    def compute_s(self, tokens: Floats, steps: Floats) -> Floats:
        """Computing so many tokens in so many steps, contexts aside."""
        return self.per_token_s * tokens + self.fixed_s * steps

    def decode_s(self, output_tokens: int, running: Floats) -> Floats:
        """What this stream's tokens take for its own sake, and for the sequences that run beside it."""
        return output_tokens * (self.per_token_s + self.per_sequence_s) * (running + 1.0)

    def sharing_s(self, output_tokens: int, shared_tokens: Floats) -> Floats:
        """What decoding saves where running sequences share a prefix: its chunks are read once for all (paper 3.2)."""
        return output_tokens * self.per_context_s * shared_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Weights of what is not plain time to the first token.

    prefill_weight: of computing what is not cached, over the time that it takes the request itself: it holds up those
        that come after, too. 0 looks at this request only, and computes a prefix twice rather than wait for it.
    decode_weight: of the time that the stream's own decoding takes; 0 looks at the first token only.
    sharing_weight: of the decode time that sharing saves; 0 leaves it out.
    reuse_share: share of evicted tokens that somebody will want again.
    """

    prefill_weight: float = 3.0
    decode_weight: float = 0.5
    sharing_weight: float = 1.0
    reuse_share: float = 0.25


def eviction_s(model: CostModel, options: CostOptions, new_tokens: Floats, free_tokens: Floats) -> Floats:
    """Computing again what must go to make room for new tokens, so far as it will be wanted."""
    overflow = np.maximum(new_tokens - free_tokens, 0.0)
    return options.reuse_share * model.per_token_s * overflow
