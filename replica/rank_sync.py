"""Keeps the ranks of a replica equal: edits ride out, digests ride back, on the all-reduces of the model's own steps.

An edit that rides on step t is applied by every rank, rank 0 included, before step t + 1. A status of each rank rides
on the same step; all ranks see all of them before a token of the step leaves.
"""

import logging
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.membership import Membership

from .prefix_tree import PrefixTree
from .protocol import ReplicaError
from .scheduler import Batch
from .tree_digest import DIGEST_BYTES, DigestChain
from .tree_edit import EditReader, Join, TreeEdit, encode

logger = logging.getLogger(__name__)

_HISTORY = 64  # edits in a dump
_STATUS = struct.Struct(f"<IIHI{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s")
STATUS_BYTES = _STATUS.size


class RanksDiffer(ReplicaError):
    """Ranks of a replica are not equal any more; says which, and in what. Nothing of the step may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What must be equal on all ranks when a step begins.

    step: its number; turns without a step count too. rows: of activations. carriers: all-reduces that take control
    rows. pool_chunks: slots of the pool.
    edits, tree, sampled: digests of all edits applied, of the prefix tree, of all tokens sampled.
    """

    step: int
    rows: int
    carriers: int
    pool_chunks: int
    edits: bytes
    tree: bytes
    sampled: bytes

    def encode(self) -> bytes:
        return _STATUS.pack(
            self.step & 0xFFFFFFFF, self.rows, self.carriers, self.pool_chunks, self.edits, self.tree, self.sampled
        )  # fmt: skip

    @classmethod
    def decode(cls, raw: bytes) -> "RankStatus":
        step, rows, carriers, pool_chunks, edits, tree, sampled = _STATUS.unpack(raw)
        return cls(
            step=step, rows=rows, carriers=carriers, pool_chunks=pool_chunks, edits=edits, tree=tree, sampled=sampled
        )  # fmt: skip

    def difference(self, other: "RankStatus") -> str:
        """What is not as in the other, in words."""
        parts = []
        for name in ("step", "rows", "carriers", "pool_chunks", "edits", "tree", "sampled"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                show = (lambda value: value.hex()) if isinstance(ours, bytes) else str
                parts.append(f"{name} {show(ours)}, not {show(theirs)}")
        return ", ".join(parts)


def compare(statuses: Sequence[RankStatus | None]) -> str | None:
    """Which ranks differ from most of the others (in doubt from rank 0), and in what; None if all are equal."""
    known = [status for status in statuses if status is not None]
    if not known or all(status == known[0] for status in statuses):
        return None
    ((usual, count), *_) = Counter(known).most_common(1)
    if statuses[0] is not None and 2 * count <= len(known):
        usual = statuses[0]
    lines = [
        f"rank {rank}: {status.difference(usual) if status is not None else 'has not begun the step'}"
        for rank, status in enumerate(statuses)
        if status != usual
    ]
    return "; ".join(lines)


class RankSync:
    """One rank's part in it.

    Args:
        place: of this rank in its group.
        collectives: whose all-reduces carry.
        tree: this rank's own.
        stall_s: how long rank 0 waits for the others to begin a step.
    """

    def __init__(self, place: Membership, collectives: Collectives, tree: PrefixTree, *, stall_s: float = 60.0) -> None:
        assert collectives.control is not None, "the collectives carry nothing"
        self._place, self._collectives, self._control = place, collectives, collectives.control
        self._tree = tree
        self._stall_s = stall_s
        self._outbox = bytearray()
        self._reader = EditReader()
        self._due: list[TreeEdit] = []
        self._step = 0
        self._edits = blake2b(digest_size=DIGEST_BYTES)
        self._sampled = DigestChain()
        self._own: RankStatus | None = None
        self._history: deque[str] = deque(maxlen=_HISTORY)
        self.carried_bytes = 0

    @property
    def is_leader(self) -> bool:
        return self._place.rank == 0

    # -- edits ---------------------------------------------------------------------------------------------------------

    def push(self, edit: TreeEdit) -> None:
        """Rank 0 decides: it goes out with the next step, or as many as it takes."""
        self._outbox += encode(edit)

    def take_due(self) -> list[TreeEdit]:
        """Edits to apply now, in order, before the next step; the same on all ranks."""
        due, self._due = self._due, []
        for edit in due:
            raw = encode(edit)
            self._edits.update(raw)
            self._history.append(f"before step {self._step}: {_brief(edit, raw)}")
        return due

    def exchange(self) -> None:
        """In place of a step, when there is nothing to compute: rank 0's edits, all of them. Others wait for them.

        Raises:
            RanksDiffer: as it says.
        """
        self._begin(rows=0)
        if self.is_leader:
            reports = self._await_reports()
            if words := self._compare(reports):
                raise RanksDiffer(words)
        self._hear(self._place.group.broadcast(bytes(self._outbox)))
        self._outbox.clear()

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, batch: Batch) -> None:
        """Before the model runs."""
        status = self._begin(batch.num_tokens)
        payload = bytes(self._outbox[: self._control.room])
        del self._outbox[: len(payload)]
        self.carried_bytes += len(payload)
        self._control.write(status, payload, more=bool(self._outbox))
        self._collectives.begin_step(self._check_shapes if self.is_leader else None)

    def end_step(self) -> None:
        """After the model has run, before anything of it is used.

        Raises:
            RanksDiffer: as it says.
        """
        raw, payload = self._control.read()
        if any(one != raw[0] for one in raw):
            words = compare([RankStatus.decode(one) for one in raw])
            raise RanksDiffer(f"ranks differ at step {self._step}: {words}")
        self._hear(payload)

    def note_sampled(self, token_ids: Sequence[int]) -> None:
        """Tokens of the step, in the batch's order; -1 where there was none to choose."""
        self._sampled.note_all(token_ids)

    # -- trouble -------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises RanksDiffer if a rank is lost."""
        if self._place.link.lost is not None:
            raise RanksDiffer(self._place.link.lost)

    def explain(self, fault: BaseException) -> str:
        """What lies behind a fault of this rank: often another rank's."""
        reports = self._place.link.reports(lambda raw: False, timeout_s=1.0) if self.is_leader else {}
        return " | ".join(dict.fromkeys(filter(None, (*self._words(reports, "").split(" | "), str(fault)))))

    def dump(self) -> str:
        """The last edits that this rank applied, and its status; no words of anybody."""
        lines = "\n".join(self._history)
        return f"rank {self._place.rank}, {self._own}, last edits:\n{lines}"

    def leave(self, reason: str | None = None) -> None:
        """End the group."""
        if reason is not None:
            logger.error("rank stops rank=%d reason=%s\n%s", self._place.rank, reason, self.dump())
        self._place.leave(reason)

    def _begin(self, rows: int) -> bytes:
        """A turn of all ranks begins: a step, or an exchange with no rows. This rank's status."""
        self.check_alive()
        self._step += 1
        self._tree.audit_slots()
        assert self._tree.audit is not None
        self._own = RankStatus(
            step=self._step,
            rows=rows,
            carriers=self._control.num_open,
            pool_chunks=self._tree.pool.num_slots,
            edits=self._edits.copy().digest(),
            tree=self._tree.audit.digest(),
            sampled=self._sampled.digest(),
        )
        status = self._own.encode()
        if not self.is_leader:
            self._place.link.report(status)
        return status

    def _await_reports(self) -> dict[int, bytes]:
        """What the other ranks say of this turn, once all have begun it."""
        assert self._own is not None
        step = self._own.step
        reports = self._place.link.reports(lambda raw: RankStatus.decode(raw).step == step, self._stall_s)
        if self._place.link.lost is not None or len(reports) + 1 < self._place.num_ranks:
            raise RanksDiffer(self._words(reports, "not all ranks have begun the step"))
        return reports

    def _check_shapes(self) -> None:
        """Before a step's first sum: buffers of different sizes cannot be summed (gloo aborts, NCCL hangs)."""
        assert self._own is not None
        reports = self._await_reports()
        others = [RankStatus.decode(raw) for raw in reports.values()]
        own = (self._own.step, self._own.rows, self._own.carriers)
        if any((other.step, other.rows, other.carriers) != own for other in others):
            raise RanksDiffer(self._words(reports, ""))

    def _words(self, reports: dict[int, bytes], otherwise: str) -> str:
        known = (self._place.link.lost, self._compare(reports))
        return " | ".join(filter(None, known)) or otherwise

    def _compare(self, reports: dict[int, bytes]) -> str | None:
        if self._own is None or not reports:
            return None
        by_rank = {rank: RankStatus.decode(raw) for rank, raw in reports.items()}
        words = compare([self._own, *(by_rank.get(rank) for rank in range(1, self._place.num_ranks))])
        return f"ranks differ at step {self._own.step}: {words}" if words else None

    def _hear(self, payload: bytes) -> None:
        self._due.extend(self._reader.feed(payload))


def _brief(edit: TreeEdit, raw: bytes) -> str:
    digest = blake2b(raw, digest_size=4).hexdigest()
    if isinstance(edit, Join):
        prompt = len(edit.request.prompt_token_ids)
        return f"Join arrival={edit.arrival} n={edit.request.n} prompt_tokens={prompt} digest={digest}"
    return f"{edit} digest={digest}"
