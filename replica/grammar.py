"""Answers that follow a JSON schema or a regular expression: which tokens may come next. llguidance does the work."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from .protocol import GrammarSpec
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Compiled grammars that are kept for the next request with the same one, refusals too.
_CACHED = 64

# Of llguidance's own units. Its default lets `x(a{1000}){1000}` take two seconds; with this much it takes 0.1 s to
# compile, then fails within 10 ms in the step where it grows too large (2 cores of Zen 3).
_LEXER_FUEL = 100_000

# Its default of 2,000 refuses objects of a thousand optional properties; 20,000 items take a millisecond.
_ROW_ITEMS = 20_000


class GrammarError(ValueError):
    """A schema or an expression that cannot be followed; says why."""


class Grammar:
    """What one choice may say, and has said. Not thread-safe."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> "Grammar":
        """Another one, as far as this one."""
        return Grammar(self._matcher.deep_copy())

    @property
    def failure(self) -> str | None:
        """Why nothing may come next: the grammar has become too large on the way."""
        return (self._matcher.get_error().strip().splitlines() or ["unknown"])[0] if self._matcher.is_error() else None

    def allow(self, bits: NDArray[np.int32]) -> None:
        """Write a bit per token, the first one lowest: whether it may come next. None may after a failure.

        Args:
            bits: [ceil(V / 32)]
        """
        llguidance.numpy.fill_next_token_bitmask(self._matcher, bits[None], 0)
        if self._matcher.is_error():
            bits[:] = 0

    def accept(self, token_id: int) -> None:
        """The choice goes on with this token."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones; from any thread, one at a time.

    Args:
        tokenizer: of the model.
        eos_token_ids: may come where the grammar allows an end; none stands for the tokenizer's own.
        limit_s: CPU seconds to compile a grammar and find its first tokens; None has no limit, as on ranks that follow
            one which has kept it.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Iterable[int] = (), *, limit_s: float | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._limit_s = limit_s
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[tuple[str, str], Grammar | str] = OrderedDict()  # a text is a refusal
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def warm_up(self) -> None:
        """Take now the second that the first grammar would take for the vocabulary; where it cannot be had, say so."""
        with self._compiling:
            try:
                self._load_vocabulary()
            except GrammarError as error:
                logger.warning("grammars refused reason=%s", error)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A grammar at its beginning; at once if it is known.

        Raises:
            GrammarError: it is broken, or too large.
        """
        key = spec.kind, spec.text
        known = self._look_up(key)
        if known is None:
            with self._compiling:
                known = self._look_up(key) or self._remember(key, spec)
        if isinstance(known, str):
            raise GrammarError(known)
        return known.copy()

    def _look_up(self, key: tuple[str, str]) -> Grammar | str | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _remember(self, key: tuple[str, str], spec: GrammarSpec) -> Grammar | str:
        made: Grammar | str
        try:
            made = self._compile(spec)
        except GrammarError as error:
            made = str(error)
        with self._lock:
            self._known[key] = made
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return made

    def _compile(self, spec: GrammarSpec) -> Grammar:
        vocabulary = self._load_vocabulary()
        begin_s = time.thread_time()
        try:
            text = _grammar_text(spec)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, max_items_in_row=_ROW_ITEMS, verbose_errors=False)
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        grammar = Grammar(matcher)
        # The lexer's tables are made with the first tokens, and copies share them.
        bits = np.zeros(-(-self._tokenizer.vocab_size // 32), np.int32)
        grammar.allow(bits)
        trial = grammar.copy()
        if grammar.failure is None:
            trial.accept(int(np.unpackbits(bits.view(np.uint8), bitorder="little").argmax()))
        if failure := grammar.failure or trial.failure:
            raise GrammarError(failure)
        took_s = time.thread_time() - begin_s
        if self._limit_s is not None and took_s > self._limit_s:
            raise GrammarError(
                f"takes {took_s:.2f} s to compile; allowed are {self._limit_s:g} s (max_grammar_compile_s)"
            )
        return grammar

    def _load_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            try:
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer.backend, self._tokenizer.vocab_size, self._eos_token_ids or None
                )
            except ValueError as error:
                raise GrammarError(f"this model's tokenizer cannot follow grammars: {error}") from error
        return self._vocabulary


def _grammar_text(spec: GrammarSpec) -> str:
    """In llguidance's own language. Raises ValueError for what it cannot read."""
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    # As json.dumps writes; free white space lets a small model write nothing else for ever.
    return LLMatcher.grammar_from_json_schema(
        spec.text, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
