"""Fits what a step takes to measured steps, while they run. No torch."""

import numpy as np

from .protocol import StepTime

# Units that bring the four coefficients near 1.
_UNITS = np.array([1e-2, 1e-4, 1e-8, 1e-4])


class StepFit:
    """Recursive least squares with forgetting; coefficients are at least 0.

    Args:
        prior: what is believed at first.
        forgetting: weight of a step falls by this factor with each step after it.
        trust: steps that the prior counts for; less of it is left as steps come in.
    """

    def __init__(self, prior: StepTime | None = None, *, forgetting: float = 0.995, trust: float = 0.1) -> None:
        prior = prior or StepTime()
        known = np.array([prior.fixed_s, prior.per_token_s, prior.per_context_s, prior.per_sequence_s])
        self._weights = known / _UNITS
        self._covariance = np.eye(4) / trust
        self._forgetting = forgetting
        self.num_steps = 0

    def observe(self, seconds: float, *, tokens: int, context_tokens: float, sequences: int) -> None:
        """A step that computed `tokens` tokens, with context_tokens of context each on average, of `sequences`."""
        row = np.array([1.0, tokens, tokens * context_tokens, sequences]) * _UNITS
        # Relative errors count: else the long steps would say everything.
        row, target = row / seconds, 1.0
        projected = self._covariance @ row
        gain = projected / (self._forgetting + row @ projected)
        self._weights = np.maximum(self._weights + gain * (target - row @ self._weights), 0.0)
        self._covariance = (self._covariance - np.outer(gain, projected)) / self._forgetting
        # Where steps are all alike, forgetting would blow the covariance up.
        self._covariance *= min(1.0, 1e4 / float(np.trace(self._covariance)))
        self.num_steps += 1

    @property
    def step(self) -> StepTime:
        """The fit so far, rounded to three digits, so that equal news need not be told."""
        fixed, token, context, sequence = (float(f"{value:.3g}") for value in self._weights * _UNITS)
        return StepTime(fixed_s=fixed, per_token_s=token, per_context_s=context, per_sequence_s=sequence)
