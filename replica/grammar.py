"""Answers that follow a JSON schema or a regular expression: which tokens may come next. llguidance does the work."""

import threading
import time
from collections import OrderedDict

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import torch
from torch import Tensor

from .protocol import GrammarSpec
from .tokenizer import Tokenizer

# Compiled grammars that are kept for the next request with the same one, refusals too.
_CACHED = 64

# CPU seconds to compile a grammar and to find its first tokens. One that is slow there would be slow in every step.
_COMPILE_LIMIT_S = 1.0


class GrammarError(ValueError):
    """A schema or an expression that cannot be followed; says why."""


class Grammar:
    """What one choice may say, and has said. Not thread-safe."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def copy(self) -> "Grammar":
        """Another one, as far as this one."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def restrict(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that may not come next to minus infinity, in place; all of them on a failure."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        allowed = np.unpackbits(self._bits.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        if self._matcher.is_error():
            allowed[:] = 0
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        """The choice goes on with this token."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for one tokenizer; from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], Grammar | GrammarError] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A grammar at its beginning.

        Raises:
            GrammarError: it is broken, or too large.
        """
        with self._lock:
            key = spec.kind, spec.text
            if key not in self._compiled:
                try:
                    self._compiled[key] = self._compile(spec)
                except GrammarError as error:
                    self._compiled[key] = error
                if len(self._compiled) > _CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            known = self._compiled[key]
            if isinstance(known, GrammarError):
                raise known
            return known.copy()

    def _compile(self, spec: GrammarSpec) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = llguidance.hf.from_tokenizer(self._tokenizer.backend, self._tokenizer.vocab_size)
        try:
            if spec.kind == "json_schema":
                # As json.dumps writes; free white space lets a small model write nothing else for ever.
                text = llguidance.LLMatcher.grammar_from_json_schema(
                    spec.text, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
                )
            else:
                text = llguidance.LLMatcher.grammar_from_regex(spec.text)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        begin_s = time.thread_time()
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0)
        grammar = Grammar(matcher, self._tokenizer.vocab_size)
        grammar.restrict(torch.zeros(self._tokenizer.vocab_size))
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        if (took_s := time.thread_time() - begin_s) > _COMPILE_LIMIT_S:
            raise GrammarError(f"takes {took_s:.1f} s to compile; allowed are {_COMPILE_LIMIT_S:g} s")
        return grammar
