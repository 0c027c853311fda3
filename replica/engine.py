"""The loop of a replica: schedule, plan, run, sample, commit, and text to whoever asked. One thread owns all of it."""

import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from chunkserve.kernels.plan import PlanOptions

from .chunk_pool import ChunkPool
from .grammar import Grammar, GrammarError, Grammars
from .hot_prefixes import hot_prefixes
from .prefix_tree import PrefixTree
from .prompt_counts import PromptCounts
from .protocol import (
    EngineStopped,
    FinishReason,
    ReplicaLoad,
    ReplicaOverloaded,
    Request,
    RequestRefused,
    TokenEvent,
    TokenLogprob,
)
from .rank_sync import RanksDiffer, RankSync
from .reporter import RoutingReporter
from .sampler import Sampled
from .scheduler import Scheduler
from .sequence import Sequence, SequenceState
from .stall_watch import watch_for_stalls
from .step_core import Outcome, Runner, StepCore
from .text_stream import TextStream
from .tokenizer import Tokenizer
from .tree_digest import DigestChain
from .tree_edit import Clear, Join, Leave, TreeEdit

logger = logging.getLogger(__name__)

# What a step has for its requests: pairs of request_id and event, in order. Called on the engine's thread.
Emit = Callable[[list[tuple[str, TokenEvent]]], None]

# Idle ranks hear from each other so often.
_IDLE_BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one replica.

    chunk_size: tokens per chunk.
    num_slots: chunks that the pool holds.
    chunk_bytes: K and V of one chunk over all layers, for reports.
    max_sequence_tokens: prompt and completion together.
    max_running: sequences in one step.
    max_step_tokens: tokens in one step.
    max_waiting: sequences that may wait; more are refused as overload.
    prefix_sharing: share chunks between sequences.
    retain_prefixes: keep chunks after their last sequence.
    eos_token_ids: end a completion.
    max_grammar_compile_s: CPU seconds to compile a grammar; slower ones are refused.
    stall_warning_s: with requests and without a step for so long, a warning is logged.
    plan: how steps are cut into work items.
    """

    chunk_size: int
    num_slots: int
    chunk_bytes: int
    max_sequence_tokens: int
    max_running: int
    max_step_tokens: int
    max_waiting: int
    prefix_sharing: bool = True
    retain_prefixes: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    max_grammar_compile_s: float = 1.0
    stall_warning_s: float = 10.0
    plan: PlanOptions = field(default_factory=PlanOptions)


class Engine:
    """One replica's engine. `submit`, `cancel`, `ping` and `load` may be called from any thread.

    Args:
        runner: computes the steps.
        tokenizer: used by the engine's thread alone.
        config: sizes and limits.
        emit: gets the events of a step; must not block.
        clock: monotonic seconds.
        reporter: watches on behalf of routers.
        sync: makes this the leader of several ranks, over the tree that `build_tree` gave.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        reporter: RoutingReporter | None = None,
        tree: PrefixTree | None = None,
        sync: RankSync | None = None,
    ) -> None:
        capacity = config.num_slots * config.chunk_size
        if capacity < config.max_sequence_tokens:
            raise ValueError(
                f"the KV pool holds {config.num_slots} chunks of {config.chunk_size} tokens, {capacity} in all; "
                f"a sequence may have {config.max_sequence_tokens} (max_sequence_tokens; or raise kv_pool_bytes)"
            )
        self.config = config
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, config.eos_token_ids, limit_s=config.max_grammar_compile_s)
        self._emit = emit
        self._clock = clock
        self.reporter = reporter
        self._tree = tree or build_tree(config, reporter)
        self._scheduler = Scheduler(self._tree, max_running=config.max_running, max_step_tokens=config.max_step_tokens)
        self._sync = sync
        self._core = StepCore(
            self._scheduler, runner, plan=config.plan, eos_token_ids=config.eos_token_ids, sync=sync
        )  # fmt: skip
        self._coming: dict[int, list[Sequence]] = {}  # by arrival of the first; their Join is on its way
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, list[TextStream]] = {}  # by request_id; unfinished choices
        self._arrivals = 0
        self._lock = threading.Lock()
        self._num_open = 0  # unfinished sequences, those in the inbox included; guarded by the lock
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._stopping = False
        self._ended = threading.Event()
        self._closed = False  # nothing is taken from the inbox any more; guarded by the lock
        self._last_turn_s = clock()
        self._prompts = PromptCounts(config.max_step_tokens)
        self._generated_tokens = 0
        self._cancelled = 0
        self._finished: Counter[FinishReason] = Counter()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()
        watched = (
            self._ended,
            self.config.stall_warning_s,
            lambda: self._last_turn_s if self._num_open else None,
            self.load,
        )
        threading.Thread(target=watch_for_stalls, args=watched, name="engine-watch", daemon=True).start()

    def stop(self) -> None:
        """End the loop after its current step; what is unfinished gets an error event."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def join(self) -> bool:
        """Wait until the loop has ended; whether it failed."""
        if self._thread is not None:
            self._thread.join()
        return self._fault is not None

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar, up to seconds, so that `submit` finds it; on a thread that nobody waits for.

        Raises:
            RequestRefused: the grammar can never be followed here.
        """
        self._grammar(request)

    def submit(self, request: Request) -> None:
        """Queue a request; its events come through `emit`. A grammar that is not prepared is compiled first.

        Raises:
            RequestRefused: it can never be served here.
            ReplicaOverloaded: too many wait.
            EngineStopped: the loop has ended.
        """
        prompt, wanted = len(request.prompt_token_ids), request.sampling.max_tokens
        if prompt == 0:
            raise RequestRefused("the prompt has no tokens", "prompt")
        if wanted < 1:
            raise RequestRefused(f"max_tokens is {wanted}; at least 1 is served", "max_tokens")
        if prompt + wanted > self.config.max_sequence_tokens:
            raise RequestRefused(
                f"prompt has {prompt} tokens and max_tokens is {wanted}, {prompt + wanted} in all; replica allows "
                f"{self.config.max_sequence_tokens} (max_sequence_tokens)",
                "max_tokens",
            )
        grammar = self._grammar(request)
        with self._lock:
            self.check_alive()
            waiting = self._num_open - len(self._scheduler.running)
            if waiting + request.n > self.config.max_waiting + self.config.max_running:
                raise ReplicaOverloaded(
                    f"{waiting} sequences wait, {request.n} more would pass the limit of {self.config.max_waiting} "
                    "(max_waiting_requests)"
                )
            self._num_open += request.n
            self._inbox.put(lambda: self._begin(request, grammar))

    def _grammar(self, request: Request) -> Grammar | None:
        spec = request.sampling.grammar
        if spec is None:
            return None
        try:
            return self._grammars.compile(spec)
        except GrammarError as error:
            raise RequestRefused(f"{spec.param}: {error}", spec.param) from None

    def check_alive(self) -> None:
        """Raises EngineStopped if the loop has ended."""
        if self._fault is not None:
            raise EngineStopped(f"the engine has failed: {self._fault}")
        if self._stopping or self._closed:
            raise EngineStopped("the engine has stopped")

    def cancel(self, request_id: str) -> None:
        """Drop a request wherever it is; nothing happens if it has ended."""
        self._inbox.put(lambda: self._cancel(request_id))

    def ping(self, timeout_s: float) -> None:
        """Wait until the loop goes round.

        Raises:
            EngineStopped: it has ended.
            TimeoutError: it did not within timeout_s.
        """
        answered = threading.Event()
        with self._lock:
            self.check_alive()
            self._inbox.put(answered.set)
        if not answered.wait(timeout_s):
            self.check_alive()
            raise TimeoutError(f"the engine's loop has not come round for {self._turn_age_s():.1f} s")

    def clear_prefixes(self) -> None:
        """Forget all chunks that nobody uses."""
        self._inbox.put(lambda: self._edit(Clear()))

    def load(self) -> ReplicaLoad:
        reporter = self.reporter
        report = reporter.report() if reporter is not None else None
        with self._lock:
            running = len(self._scheduler.running)
            waiting = max(0, self._num_open - running)
        return ReplicaLoad(
            running_sequences=running,
            waiting_sequences=waiting,
            chunks_total=self.config.num_slots,
            chunks_in_use=self._tree.num_nodes - self._tree.num_idle,
            chunks_retained=self._tree.num_idle,
            chunk_bytes=self.config.chunk_bytes,
            steps=self._core.num_steps,
            last_step_age_s=self._turn_age_s() if self._num_open else 0.0,
            computed_prompt_tokens=self._prompts.computed_tokens,
            cached_prompt_tokens=self._prompts.cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.num_preemptions,
            cancelled_requests=self._cancelled,
            finished=dict(self._finished),
            backlog_s=report.backlog_s if report is not None else None,
            step=report.step if report is not None else None,
            hot_prefixes=hot_prefixes(list(self._scheduler.running)),
        )

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration; False if there was nothing to compute."""
        begin_s = self._clock()
        if self._sync is not None:
            for edit in self._sync.take_due():
                self._apply(edit)
        outcome = self._core.compute()
        if outcome is None:
            if self._sync is not None:
                self._sync.exchange()
            return False
        self._prompts.add(outcome.batch)
        if self.reporter is not None:
            self.reporter.observe(outcome.batch, self._clock() - begin_s)
        with self._lock:
            self._core.settle(outcome)
        if events := self._events(outcome):
            self._emit(events)
        return True

    def check(self) -> None:
        """Assert the invariants of tree, pool and scheduler; linear in the tree."""
        self._scheduler.check()

    def _loop(self) -> None:
        try:
            busy = False
            while True:
                self._take_messages(wait=not busy)
                if self._stopping:
                    break
                self._last_turn_s = self._clock()
                if self.reporter is not None:
                    self.reporter.publish(self._scheduler, self._prompts, now=not busy)
                was_busy, busy = busy, self.step()
                self._last_turn_s = self._clock()
                if not busy:
                    if was_busy:
                        self.check()
                    if self.reporter is not None:
                        self.reporter.publish(self._scheduler, self._prompts, now=True)
        except BaseException as fault:
            self._fault = RanksDiffer(self._sync.explain(fault)) if self._sync is not None else fault
            logger.exception("engine stopped unfinished=%d", self._num_open)
        finally:
            if self._sync is not None:
                self._sync.leave(str(self._fault) if self._fault is not None else None)
            self._abandon()
            self._ended.set()

    def _take_messages(self, wait: bool) -> None:
        """Carry out what other threads asked for; with `wait`, block until there is something, or a beat is due."""
        messages: Iterable[Callable[[], None] | None] = []
        if wait:
            try:
                messages = [self._inbox.get(timeout=_IDLE_BEAT_S if self._sync is not None else None)]
            except queue.Empty:
                return
        while True:
            for message in messages:
                if message is not None:
                    message()
            try:
                messages = [self._inbox.get_nowait()]
            except queue.Empty:
                return

    def _begin(self, request: Request, grammar: Grammar | None) -> None:
        if request.request_id in self._streams:
            self._close_unknown(request, f"request_id {request.request_id} is in use")
            return
        seed = request.sampling.seed if request.sampling.seed is not None else random.getrandbits(63)
        join = Join(arrival=self._arrivals + 1, request=request, seed=seed)
        self._arrivals += request.n
        sequences = Sequence.begin_all(request, arrival=join.arrival, seed=seed, grammar=grammar)
        self._coming[join.arrival] = sequences
        self._streams[request.request_id] = [TextStream(sequence, self._tokenizer) for sequence in sequences]
        self._edit(join)
        if self.reporter is not None:
            self.reporter.begin(request)

    def _cancel(self, request_id: str) -> None:
        streams = self._streams.get(request_id)
        if not streams:
            return
        self._cancelled += 1
        events = [(request_id, self._finish(stream, "cancelled")) for stream in list(streams)]
        logger.info("request cancelled request_id=%s choices=%d", request_id, len(events))
        self._emit(events)

    def _edit(self, edit: TreeEdit) -> None:
        """Have an edit applied: at once, or by all ranks between the same two steps."""
        if self._sync is None or self._fault is not None or self._stopping:
            self._apply(edit)
        else:
            self._sync.push(edit)

    def _apply(self, edit: TreeEdit) -> None:
        match edit:
            case Join():
                self._core.join(self._coming.pop(edit.arrival))
            case Leave():
                self._core.leave(edit.arrival)
            case Clear():
                logger.info("prefixes cleared chunks=%d", self._tree.clear())

    def _events(self, outcome: Outcome) -> list[tuple[str, TokenEvent]]:
        """What a step means for its streams; a sequence without one has been given up, and is about to leave."""
        events = []
        for sequence, sampled in outcome.sampled.items():
            request_id = sequence.request.request_id
            stream = next((s for s in self._streams.get(request_id, ()) if s.sequence is sequence), None)
            if stream is not None:
                events.append((request_id, self._advance(stream, sampled, outcome.ended.get(sequence))))
        return events

    def _advance(self, stream: TextStream, sampled: Sampled, reason: FinishReason | None) -> TokenEvent:
        """What a new token means for its stream; with a reason it is the last."""
        if sampled.token_id is None:
            failure = stream.sequence.grammar.failure if stream.sequence.grammar is not None else None
            error = f"the grammar failed: {failure}" if failure else "the model's logits are not numbers"
            return self._finish(stream, "error", error=error)
        self._generated_tokens += 1
        token_id = sampled.token_id
        text = "" if reason == "stop" else stream.add(token_id)
        reason = "stop" if stream.is_stopped else reason
        logprobs = stream.logprobs(sampled)
        if reason is not None:
            return self._finish(stream, reason, text=text, token_ids=(token_id,), logprobs=logprobs)
        return stream.event(text=text, token_ids=(token_id,), logprobs=logprobs)

    def _finish(
        self,
        stream: TextStream,
        reason: FinishReason,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
        is_lost: bool = False,
    ) -> TokenEvent:
        """End a stream: its last event, and its chunks are free for others."""
        text += stream.rest()
        sequence = stream.sequence
        sequence.finish_reason = reason
        event = stream.event(text=text, token_ids=token_ids, logprobs=logprobs, finish_reason=reason, error=error)
        if is_lost:
            event = replace(event, is_lost=True)
        with self._lock:
            if sequence.state is not SequenceState.FINISHED:
                self._edit(Leave(arrival=sequence.arrival))
            self._num_open -= 1
        self._finished[reason] += 1
        request_id = sequence.request.request_id
        self._streams[request_id].remove(stream)
        if not self._streams[request_id]:
            del self._streams[request_id]
            if self.reporter is not None:
                self.reporter.end(request_id)
        return event

    def _abandon(self) -> None:
        """The loop has ended: everything unfinished gets an error event, now and for what still lies in the inbox."""
        reason = f"the engine has failed: {self._fault}" if self._fault else "the engine has stopped"
        while True:
            events = [
                (request_id, self._finish(stream, "error", error=reason, is_lost=True))
                for request_id, streams in list(self._streams.items())
                for stream in list(streams)
            ]
            if events:
                self._emit(events)
            with self._lock:
                self._closed = not self._streams and self._inbox.empty()
            if self._closed:
                return
            self._take_messages(wait=False)

    def _close_unknown(self, request: Request, error: str) -> None:
        """End a request that never became streams."""
        with self._lock:
            self._num_open -= request.n
        self._emit(
            [
                (
                    request.request_id,
                    TokenEvent(
                        choice=choice,
                        text="",
                        token_ids=(),
                        finish_reason="error",
                        prompt_tokens=len(request.prompt_token_ids),
                        cached_tokens=0,
                        completion_tokens=0,
                        error=error,
                    ),
                )
                for choice in range(request.n)
            ]
        )

    def _turn_age_s(self) -> float:
        return self._clock() - self._last_turn_s


def build_tree(config: EngineConfig, reporter: RoutingReporter | None = None, *, audited: bool = False) -> PrefixTree:
    """An empty prefix tree over an empty pool; audited where other ranks must have an equal one."""
    return PrefixTree(
        ChunkPool(config.num_slots),
        config.chunk_size,
        share=config.prefix_sharing,
        retain=config.retain_prefixes,
        journal=reporter.journal if reporter is not None else None,
        audit=DigestChain() if audited else None,
    )
