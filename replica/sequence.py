"""One stream of tokens: a choice of a request, on its way through the engine. No torch."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .prefix_tree import Joined, Node, RootKey
from .protocol import FinishReason, Request
from .token_counts import TokenCounts

if TYPE_CHECKING:
    from .grammar import Grammar


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A choice of a request.

    arrival: rises with arrival; the scheduler's order, and the youngest is preempted first.
    seed: of its random numbers.
    token_ids: prompt and generated tokens.
    num_computed: leading tokens that need no computation any more.
    kv_present: leading tokens whose K and V are in the pool; num_computed, or one more after a full hit.
    cached_tokens: prompt tokens found in the tree when the sequence first joined.
    is_counted: whether cached_tokens are in the replica's totals.
    path: its chunks in the tree while it runs.
    counts: of its tokens, where penalties look at them.
    grammar: what its text must follow, as far as it has come.
    """

    request: Request
    choice: int
    arrival: int
    seed: int
    token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    kv_present: int = 0
    cached_tokens: int | None = None
    is_counted: bool = False
    path: list[Node] = field(default_factory=list)
    waits_for: Node | None = None
    finish_reason: FinishReason | None = None
    counts: TokenCounts | None = None
    grammar: "Grammar | None" = None
    _slots: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def begin_all(
        cls, request: Request, *, arrival: int, seed: int, grammar: "Grammar | None" = None
    ) -> "list[Sequence]":
        """One for each choice, with arrivals and seeds that follow each other, and a copy of the grammar each."""
        return [
            cls(
                request=request, choice=choice, arrival=arrival + choice, seed=seed + choice,
                token_ids=list(request.prompt_token_ids), counts=_counts(request),
                grammar=grammar.copy() if grammar is not None else None,
            )
            for choice in range(request.n)
        ]  # fmt: skip

    @property
    def root_key(self) -> RootKey:
        """Under which root of the tree its chunks are: that of its salt, or one for its request alone."""
        return self.request.cache_salt if self.request.prefix_cache else self.arrival - self.choice

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def slots(self) -> NDArray[np.int32]:
        """Slots of the path, root first."""
        return self._slots

    def enter(self, joined: Joined) -> None:
        """The sequence has its place in the tree and runs."""
        self.state = SequenceState.RUNNING
        self.path = joined.path
        self.num_computed = joined.num_cached
        self.kv_present = joined.kv_present
        self.waits_for = None
        if self.cached_tokens is None:
            # A preempted sequence finds its own chunks again; those are no hits.
            self.cached_tokens = joined.num_cached
        self.path_changed()

    def path_changed(self) -> None:
        self._slots = np.fromiter((node.slot for node in self.path), np.int32, len(self.path))

    def path_grew(self) -> None:
        """The path has one chunk more."""
        self._slots = np.append(self._slots, np.int32(self.path[-1].slot))

    def exit(self, state: SequenceState) -> None:
        """The sequence has left the tree."""
        self.state = state
        self.path = []
        self.num_computed = self.kv_present = 0
        self._slots = np.zeros(0, np.int32)


def _counts(request: Request) -> TokenCounts | None:
    if not request.sampling.has_penalties:
        return None
    return TokenCounts(request.prompt_token_ids, with_prompt=request.sampling.repetition_penalty != 1.0)
