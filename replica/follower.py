"""The loop of a rank that is not rank 0: it does what the edits say, and what follows from them."""

import logging

from .grammar import Grammars
from .rank_sync import RankSync
from .sequence import Sequence
from .step_core import StepCore
from .tree_edit import Clear, Join, Leave

logger = logging.getLogger(__name__)


class Follower:
    """Runs until the group ends.

    Args:
        core: this rank's part of each step.
        sync: the same that the core has.
        grammars: compiled again here, from the text in the edits: the leader has them, so they are neither broken nor
            slow. The step waits for it.
    """

    def __init__(self, core: StepCore, sync: RankSync, grammars: Grammars) -> None:
        self.core = core
        self._grammars = grammars
        self._sync = sync

    def run(self) -> None:
        """Raises what stops this rank, once the others know."""
        try:
            while True:
                self.turn()
        except BaseException as fault:
            self._sync.leave(f"{type(fault).__name__}: {fault}")
            raise

    def dump(self) -> str:
        """The last edits of this rank, for a log."""
        return self._sync.dump()

    def turn(self) -> bool:
        """A step, or waiting for edits where there is none; whether it was a step."""
        for edit in self._sync.take_due():
            match edit:
                case Join():
                    self.core.join(self._begin_all(edit))
                case Leave():
                    self.core.leave(edit.arrival)
                case Clear():
                    self.core.scheduler.tree.clear()
        outcome = self.core.compute()
        if outcome is None:
            self._sync.exchange()
            return False
        self.core.settle(outcome)
        return True

    def _begin_all(self, join: Join) -> list[Sequence]:
        spec = join.request.sampling.grammar
        grammar = self._grammars.compile(spec) if spec is not None else None
        return Sequence.begin_all(join.request, arrival=join.arrival, seed=join.seed, grammar=grammar)
