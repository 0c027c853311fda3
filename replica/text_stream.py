"""A choice on its way to becoming text: from sampled tokens to the events that its client gets."""

from .protocol import FinishReason, TokenEvent, TokenLogprob
from .sampler import Sampled
from .sequence import Sequence
from .tokenizer import Detokenizer, StopStrings, Tokenizer


class TextStream:
    """The text of one sequence; used by the engine's thread alone."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(sequence.request.sampling.stop)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stop.found

    def add(self, token_id: int) -> str:
        """The text that is certain with this token."""
        return self._stop.add(self._detokenizer.add(token_id))

    def rest(self) -> str:
        """What was held back, when no token follows."""
        if self._stop.found:
            return ""
        return self._stop.add(self._detokenizer.finish()) + self._stop.finish()

    def logprobs(self, sampled: Sampled) -> tuple[TokenLogprob, ...]:
        """Of a token, if the request asked for them."""
        if self.sequence.request.sampling.logprobs is None:
            return ()
        assert sampled.token_id is not None
        assert sampled.logprob is not None
        top = tuple(self._logprob(token_id, logprob) for token_id, logprob in sampled.top)
        return (self._logprob(sampled.token_id, sampled.logprob, top),)

    def event(
        self,
        *,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """What the client is told, with the counts as they are now."""
        sequence = self.sequence
        return TokenEvent(
            choice=sequence.choice,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.cached_tokens or 0,
            completion_tokens=sequence.num_generated,
            error=error,
        )

    def _logprob(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(
            token_id=token_id, text=raw.decode("utf-8", "replace"), bytes_=raw, logprob=logprob, top=top
        )
