"""What prompts have taken since an engine's start."""

from dataclasses import dataclass

from .scheduler import Batch


@dataclass(slots=True)
class PromptCounts:
    """Totals.

    max_step_tokens: of the engine.
    computed_tokens, cached_tokens: their sum is all prompt tokens served.
    computed_steps: those that each prompt would take alone.
    """

    max_step_tokens: int
    computed_tokens: int = 0
    cached_tokens: int = 0
    computed_steps: int = 0

    def add(self, batch: Batch) -> None:
        """A step is computed; its sequences have not moved on yet."""
        for row in batch.rows:
            sequence = row.sequence
            prompt_left = sequence.num_prompt - sequence.num_computed
            if prompt_left <= 0 or sequence.num_generated:
                continue
            cached = sequence.cached_tokens or 0
            self.computed_tokens += min(prompt_left, row.num_tokens)
            if not sequence.is_counted:
                sequence.is_counted = True
                self.cached_tokens += cached
            if row.num_tokens >= prompt_left:
                self.computed_steps += -(-(sequence.num_prompt - cached) // self.max_step_tokens)
