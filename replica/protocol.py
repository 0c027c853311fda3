"""What crosses the border of a replica: requests in, token events and load out. Plain data, no torch."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What an answer must follow: a JSON schema as JSON text, or a regular expression.

    param: the field of the HTTP request that it came in.
    """

    kind: Literal["json_schema", "regex"]
    text: str
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The ingress has checked the ranges (deploy/openai_protocol.py).

    max_tokens: new tokens per choice, at least 1.
    temperature: 0 is greedy.
    top_p: share of the probability that stays, in (0, 1].
    top_k: most probable tokens that stay; 0 keeps all.
    min_p: tokens below this share of the best token's probability are dropped; 0 keeps all.
    presence_penalty, frequency_penalty: taken off a token's logit once if it was generated before, and once per time.
    repetition_penalty: divides the positive logits of prompt and generated tokens, and multiplies the negative ones.
    logit_bias: (token, what is added to its logit); before the penalties.
    grammar: what the text must follow.
    seed: equal seeds give equal tokens; None draws one per request.
    stop: the text ends before the first of these strings, wherever token borders lie.
    stop_token_ids: the text ends at any of these tokens, besides the model's own end tokens.
    ignore_eos: go on past the model's end tokens up to max_tokens (load tests).
    logprobs: None, or how many alternatives to report per token; 0 reports the chosen one only.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: GrammarSpec | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it, n times.

    request_id: unique among running requests; logs and cancellation use it.
    prompt_token_ids: at least one id, each within the vocabulary.
    n: choices; they share the prompt's chunks.
    cache_salt: requests with different salts never share chunks.
    prefix_cache: False shares chunks among its own choices only, and keeps none of them when they end.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    cache_salt: str = ""
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (natural) of one token as the model has it, before all that SamplingParams do.

    text: the token alone as text; a part of a character shows as U+FFFD, and `bytes_` has it exactly.
    top: the most probable tokens, best first, each without its own `top`.
    """

    token_id: int
    text: str
    bytes_: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What became of one choice since its last event.

    choice: index below `Request.n`.
    text: new text; may be empty while half a character or the begin of a stop string is held back.
    token_ids: the new tokens that were chosen, the end token included.
    logprobs: one per token in token_ids where they were asked for, else empty.
    finish_reason: set on the last event of a choice, and on no other.
    prompt_tokens, cached_tokens, completion_tokens: of this choice so far; cached_tokens are prompt tokens whose
        K and V were found in the prefix tree.
    error: what went wrong when finish_reason is "error".
    is_lost: with it, that the engine has ended: another replica can do the request.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRequest:
    """Asks a certain replica for the events of all requests that a reader has there; see replica/token_feed.py."""

    replica: str
    reader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that a step of the engine takes, as fitted to measured steps.

    A step that computes u tokens over contexts of c tokens on average, of r sequences, takes
    fixed_s + per_token_s u + per_context_s u c + per_sequence_s r.
    """

    fixed_s: float = 0.005
    per_token_s: float = 1e-4
    per_context_s: float = 0.0
    per_sequence_s: float = 0.0

    def prefill_s(self, tokens: int, cached_tokens: int, max_step_tokens: int) -> float:
        """A prompt of which so many tokens are to be computed, alone in its steps."""
        steps = -(-tokens // max_step_tokens)
        return self.fixed_s * steps + (self.per_token_s + self.per_context_s * (cached_tokens + 0.5 * tokens)) * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A beginning that running sequences share.

    name: the digest of its last full chunk, in hex; empty where there is none.
    tokens: its length. sharers: sequences.
    """

    name: str
    tokens: int
    sharers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica is doing now. Times in seconds, memory in bytes and chunks.

    last_step_age_s: time since the engine loop last went round; it grows only when the loop is stuck.
    computed_prompt_tokens, cached_prompt_tokens: totals since start; their sum is all prompt tokens served.
    backlog_s, step: as in RoutingReport; None without a report.
    hot_prefixes: those that save most reads now, best first.
    """

    running_sequences: int
    waiting_sequences: int
    chunks_total: int
    chunks_in_use: int
    chunks_retained: int
    chunk_bytes: int
    steps: int
    last_step_age_s: float
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    cancelled_requests: int
    finished: dict[FinishReason, int] = field(default_factory=dict)
    backlog_s: float | None = None
    step: StepTime | None = None
    hot_prefixes: tuple[HotPrefix, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReport:
    """What a replica tells the routers about itself, about twice a second; through Serve as a plain dict.

    epoch: another one than before means that all chunks are lost.
    sequence: of the changes to its chunks, as in ChunkDelta: who knows an earlier one only has something to ask for.
    taken_at_s: wall clock, Unix time; of the last change to anything else here.
    backlog_s: time to compute the prompts that are here and not computed.
    computed_tokens, computed_steps: of prompts, since the start; the steps are what each prompt would take alone.
    chunk_identity: of the root digest and the chunk size; a router hashes with the same, or knows no chunks here.
    """

    epoch: int
    taken_at_s: float
    backlog_s: float
    running_sequences: int
    waiting_sequences: int
    chunks_total: int
    chunks_in_use: int
    chunks_retained: int
    step: StepTime
    max_step_tokens: int
    chunk_identity: str
    sequence: int = 0
    computed_tokens: int = 0
    computed_steps: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDelta:
    """Chunks that a replica stored and evicted since an earlier delta, in order.

    epoch, sequence: where this delta ends; the next one is asked for from here.
    is_snapshot: all that is there, parents first, since the log does not reach back as far as asked.
    changes: each (digest, parent's digest or None for the first chunk, whether it was stored or else evicted).
    """

    epoch: int
    sequence: int
    is_snapshot: bool
    changes: tuple[tuple[bytes, bytes | None, bool], ...]


class ReplicaError(Exception):
    """Base of what a replica refuses or fails with."""


class EngineStopped(ReplicaError):
    """The engine's loop has ended, by a fault or by `stop`."""


class RequestRefused(ReplicaError):
    """The request can never be served here; `param` names the field (a client error)."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ReplicaOverloaded(ReplicaError):
    """The queue is full now; try again later or elsewhere."""
