"""What the next step computes: who joins, who decodes, which piece of which prompt. Decides only. No torch.

Iteration-level batching (Orca) with a token budget: decoding sequences come first, what is left of the budget goes to
prompts in the order of arrival, so a long prompt is computed in pieces beside running streams.
"""

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .prefix_tree import Copy, PrefixTree
from .sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A sequence's part of a step: its next num_tokens tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the step is done."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a new one is chosen."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step.

    rows: in depth-first order of the tree.
    copies: chunk rows to copy before anything else, in order.
    changed: whether anything but the length of the decoding sequences differs from the step before.
    """

    rows: tuple[BatchRow, ...]
    copies: tuple[Copy, ...]
    changed: bool

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class Scheduler:
    """Owns the waiting and the running sequences, and their places in the tree.

    Args:
        tree: whose slots bound what can run.
        max_running: sequences in one step.
        max_step_tokens: tokens in one step; at least max_running, so that all of them can decode.
    """

    def __init__(self, tree: PrefixTree, *, max_running: int, max_step_tokens: int) -> None:
        if max_step_tokens < max_running:
            raise ValueError(f"max_step_tokens {max_step_tokens} is below max_running_sequences {max_running}")
        self.tree = tree
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self._changed = True

    def chunks_needed(self, num_tokens: int) -> int:
        """Slots that a sequence of so many tokens takes when nothing of it is shared."""
        return -(-num_tokens // self.tree.chunk_size)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it is doing; it is finished."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            sequence.exit(SequenceState.FINISHED)
        elif sequence.state is SequenceState.RUNNING:
            self._leave(sequence, SequenceState.FINISHED)

    def schedule(self) -> Batch | None:
        """The next step, with its sequences' places in the tree taken; None if there is nothing to compute."""
        copies: list[Copy] = []
        self._make_room()
        tokens = dict.fromkeys(self.running, 1)
        budget = self.max_step_tokens - len(tokens)
        for sequence in self.running:
            budget -= self._more_prompt(sequence, tokens, budget)
        # Skipping over one that waits for a prefix is no injustice: it would only compute what it will be given.
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_running:
                break
            if sequence.waits_for is not None and not sequence.waits_for.is_settled:
                continue
            match = self.tree.match(sequence.root_key, sequence.token_ids)
            sequence.waits_for = match.waits_for
            if match.waits_for is not None:
                continue
            # One chunk per running sequence stays free, or the newcomer would be preempted at once.
            if not self.tree.can_join(match, spare=len(self.running)):
                break
            joined = self.tree.join(match)
            if joined.copy is not None:
                copies.append(joined.copy)
            self.waiting.remove(sequence)
            sequence.enter(joined)
            insort(self.running, sequence, key=_arrival)
            tokens[sequence] = 1
            budget -= 1 + self._more_prompt(sequence, tokens, budget - 1)
            self._changed = True
        if not tokens:
            return None
        order = sorted(tokens, key=lambda sequence: [node.node_id for node in sequence.path])
        rows = tuple(BatchRow(sequence=sequence, num_tokens=tokens[sequence]) for sequence in order)
        changed = self._changed or any(row.num_tokens > 1 for row in rows)
        # A step with prompt pieces has another shape than the one after it.
        self._changed = any(row.num_tokens > 1 or not row.samples for row in rows)
        return Batch(rows=rows, copies=tuple(copies), changed=changed)

    def commit(self, batch: Batch, sampled: dict[Sequence, int]) -> None:
        """The step is computed: K and V are there, and sampling sequences have their next token."""
        for row in batch.rows:
            sequence = row.sequence
            end = row.end
            if self.tree.commit(sequence.path, sequence.num_computed, end):
                sequence.path_changed()
                self._changed = True
            sequence.num_computed = end
            sequence.kv_present = max(sequence.kv_present, end)
            if sequence in sampled:
                sequence.token_ids.append(sampled[sequence])

    def abandon_all(self) -> Seq[Sequence]:
        """Take everything out, after a step that failed."""
        sequences = [*self.running, *self.waiting]
        for sequence in sequences:
            self.remove(sequence)
        self.tree.clear()
        return sequences

    def check(self) -> None:
        self.tree.check()
        assert all(sequence.state is SequenceState.RUNNING for sequence in self.running)
        assert all(sequence.state is SequenceState.WAITING for sequence in self.waiting)
        if not self.running:
            assert self.tree.num_nodes == self.tree.num_idle

    def _more_prompt(self, sequence: Sequence, tokens: dict[Sequence, int], budget: int) -> int:
        """Give a sequence more of its prompt than one token, within the budget; how many."""
        more = max(0, min(len(sequence.token_ids) - sequence.num_computed - 1, budget))
        tokens[sequence] += more
        return more

    def _make_room(self) -> None:
        """Give each decoding sequence's newest token its row in the tree; the youngest make room for the older."""
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or self._rows_in_tree(sequence) == len(sequence.token_ids):
                continue
            while not self.tree.can_append(sequence.path):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                if self.tree.append(sequence.path, sequence.token_ids[-1]):
                    sequence.path_grew()

    def _rows_in_tree(self, sequence: Sequence) -> int:
        return (len(sequence.path) - 1) * self.tree.chunk_size + len(sequence.path[-1].tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._leave(sequence, SequenceState.WAITING)
        self.add(sequence)

    def _leave(self, sequence: Sequence, state: SequenceState) -> None:
        self.running.remove(sequence)
        self.tree.leave(sequence.path)
        sequence.exit(state)
        self._changed = True


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
