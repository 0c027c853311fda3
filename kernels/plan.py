"""The plan of one attention step: who attends to which chunks, built once and read by every layer and backend.

Dimensions, used in every shape note of this folder:

| letter | means |
|---|---|
| B | sequences of the step, in depth-first order of their leaves |
| T | query tokens of the step; B when every sequence decodes one token |
| H, G | query heads, KV heads; H is a multiple of G and H / G is the group |
| D | head dim |
| C, S | tokens per chunk, slots of the pool |
| I, N, P | work items, chunk references of all items, partial results |

Source: ChunkAttention sections 3.2 and 3.3 (arXiv 2402.15220); path compression and the share-or-inline choice go
beyond it (docs/decisions.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from . import _cpu

Int32Array = NDArray[np.int32]

PLAN_VERSION: Final = 2
PLAN_MAGIC: Final = 0x54505031  # "TPP1"; with version and header size also in csrc/plan_format.h
PLAN_HEADER: Final = 12


class PlanError(ValueError):
    """A plan contradicts itself, its inputs, or the tensors it is used with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How a plan cuts the work.

    share: read a chunk once for all sequences that hold it; False gives one item per sequence (the paper's PagedAttn*).
    min_saved_tokens: sharing a run of t tokens among s sequences saves reading (s - 1) t of them, and costs each of
        them one partial result more; a run that saves less than this is read inside its sequences.
    num_workers: threads or multiprocessors that run the items; long items are split until all have work.
    heads_per_worker_item: KV heads that each item fans out to; the parallelism that exists without any split.
    min_split_tokens: no piece of a split item is shorter, in tokens.
    fixed_split_tokens: cut every item at absolute multiples of this many tokens, and share whole multiples only. The
        pieces of a row then depend on its own length alone, never on who shares the batch (deterministic mode).
    spare_chunks: places for so many further chunks of each decoding sequence, which `AttentionPlan.grow` fills.
    """

    share: bool = True
    min_saved_tokens: int = 1
    num_workers: int = 1
    heads_per_worker_item: int = 1
    min_split_tokens: int = 256
    fixed_split_tokens: int | None = None
    spare_chunks: int = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """Work items of one step, over one flat int32 array, so that it can be copied, compared and captured.

    An item is a run of chunks that the query tokens [q_begin, q_end) attend to. Its keys have the absolute positions
    [kv_begin, kv_begin + kv_len); query token t sees those that are at most row_pos[t]. An item whose rows all have
    no other item has `item_partial` -1 and writes the output itself; the others write q_end - q_begin partial results
    from `item_partial` on, and row t merges `row_partials[row_partial_indptr[t]:row_partial_indptr[t + 1]]` in order.

    Invariants (see `validate`):
        every (row, key) with key <= row_pos[row] lies in exactly one item of that row;
        all chunks of an item but the last are full; kv_begin is a multiple of C;
        partial numbers are unique and belong to exactly one row; a row's partials come in order of position.

    Attributes (all int32):
        data: the flat array; the others are views of it.
        seq_q_indptr: [B + 1] query tokens of each sequence.
        row_pos: [T] absolute position of each query token.
        write_slot, write_offset: [T] where `append` puts the token's K and V; -1 when they are in the pool already.
        row_partial_indptr: [T + 1]; row_partials: [P].
        item_q_begin, item_q_end, item_kv_begin, item_kv_len, item_partial: [I].
        item_chunk_indptr: [I + 1] into chunk_slots: [N]; the first ceil(item_kv_len / C) of an item's count, the rest
            are spare places.
        tail_items: [B] the item that holds the last key of each sequence.
    """

    data: Int32Array
    chunk_size: int
    seq_q_indptr: Int32Array
    row_pos: Int32Array
    write_slot: Int32Array
    write_offset: Int32Array
    row_partial_indptr: Int32Array
    row_partials: Int32Array
    item_q_begin: Int32Array
    item_q_end: Int32Array
    item_kv_begin: Int32Array
    item_kv_len: Int32Array
    item_partial: Int32Array
    item_chunk_indptr: Int32Array
    chunk_slots: Int32Array
    tail_items: Int32Array

    @property
    def num_sequences(self) -> int:
        return len(self.seq_q_indptr) - 1

    @property
    def num_rows(self) -> int:
        """Query tokens, T."""
        return len(self.row_pos)

    @property
    def num_items(self) -> int:
        return len(self.item_q_begin)

    @property
    def num_partials(self) -> int:
        return len(self.row_partials)

    @classmethod
    def from_data(cls, data: Int32Array) -> "AttentionPlan":
        """A plan over a flat array that another plan's `data` was copied to.

        Raises:
            PlanError: the array is not a plan of this version, or is cut short.
        """
        if len(data) < PLAN_HEADER or data[0] != PLAN_MAGIC or data[1] != PLAN_VERSION:
            raise PlanError(f"not a plan of version {PLAN_VERSION}: header {data[:2].tolist()}")
        chunk_size, b, t, i, n, p = (int(x) for x in data[2:8])
        sizes = (b + 1, t, t, t, t + 1, p, i, i, i, i, i, i + 1, n, b)
        if len(data) != PLAN_HEADER + sum(sizes):
            raise PlanError(f"plan has {len(data)} numbers, its header says {PLAN_HEADER + sum(sizes)}")
        ends = list(accumulate(sizes, initial=PLAN_HEADER))
        views = [data[lo:hi] for lo, hi in pairwise(ends)]
        return cls(
            data=data,
            chunk_size=chunk_size,
            seq_q_indptr=views[0],
            row_pos=views[1],
            write_slot=views[2],
            write_offset=views[3],
            row_partial_indptr=views[4],
            row_partials=views[5],
            item_q_begin=views[6],
            item_q_end=views[7],
            item_kv_begin=views[8],
            item_kv_len=views[9],
            item_partial=views[10],
            item_chunk_indptr=views[11],
            chunk_slots=views[12],
            tail_items=views[13],
        )

    @property
    def added_chunks(self) -> int:
        """Chunks that `grow` has put into spare places."""
        return int(self.data[9])

    def slots_of(self, item: int) -> Int32Array:
        """The chunks of an item, without its spare places."""
        begin = self.item_chunk_indptr[item]
        return self.chunk_slots[begin : begin - (-self.item_kv_len[item] // self.chunk_size)]

    def full_sequences(self) -> list[int]:
        """Of a plan whose sequences decode one token each: those whose last chunk this step fills."""
        return np.flatnonzero(self.write_offset == self.chunk_size - 1).tolist()

    def grow(self, new_chunks: Mapping[int, int] | None = None) -> bool:
        """Move on by one decoded token per sequence, in place: the lazy update of the paper's section 3.3.

        Args:
            new_chunks: the slot that follows, for each of the `full_sequences`.
        Returns:
            False, and nothing has changed, where a new plan is needed: a sequence has other than one new token or one
            that is in the pool already, a full one has no spare place or no slot here, or its last chunk is shared.
        """
        chunks = new_chunks or {}
        return _cpu.grow_plan(data=self.data, sequences=list(chunks), slots=list(chunks.values()))

    def validate(self, num_slots: int) -> None:
        """Check the invariants above; linear in rows x items per row.

        Args:
            num_slots: S of the pool that the plan will run over.
        Raises:
            PlanError: names the invariant and the place.
        """
        c, t = self.chunk_size, self.num_rows
        _check_indptr("seq_q_indptr", self.seq_q_indptr, t)
        _check_indptr("row_partial_indptr", self.row_partial_indptr, self.num_partials)
        _check_indptr("item_chunk_indptr", self.item_chunk_indptr, len(self.chunk_slots))
        if len(self.chunk_slots) and not (self.chunk_slots.min() >= 0 and self.chunk_slots.max() < num_slots):
            raise PlanError(f"chunk_slots leave the pool of {num_slots} slots: {self.chunk_slots.max()}")
        if t and self.write_slot.max() >= num_slots:
            raise PlanError(f"write_slot {self.write_slot.max()} leaves the pool of {num_slots} slots")
        places = np.diff(self.item_chunk_indptr)
        if (self.item_kv_begin % c).any():
            raise PlanError("an item does not begin at a chunk border")
        if (places < -(-self.item_kv_len // c)).any():
            raise PlanError("an item has more keys than places for chunks")

        # The items of each row must tile [0, row_pos + 1) and more than that only past the row's own position.
        reach = np.zeros(t, np.int64)
        items_of_row: list[list[int]] = [[] for _ in range(t)]
        for item in np.argsort(self.item_kv_begin, kind="stable"):
            begin, end = int(self.item_q_begin[item]), int(self.item_q_end[item])
            if not 0 <= begin < end <= t:
                raise PlanError(f"item {item} has the query range [{begin}, {end}) of {t}")
            if (reach[begin:end] != self.item_kv_begin[item]).any():
                raise PlanError(f"item {item} leaves a gap or an overlap at position {self.item_kv_begin[item]}")
            reach[begin:end] += self.item_kv_len[item]
            for row in range(begin, end):
                items_of_row[row].append(int(item))
        short = np.flatnonzero(reach <= self.row_pos)
        if len(short):
            raise PlanError(
                f"row {short[0]} is at position {self.row_pos[short[0]]}, its items end at {reach[short[0]]}"
            )

        seen = np.zeros(self.num_partials, bool)
        for row, items in enumerate(items_of_row):
            partials = self.row_partials[self.row_partial_indptr[row] : self.row_partial_indptr[row + 1]].tolist()
            direct = [i for i in items if self.item_partial[i] < 0]
            if direct and len(items) > 1:
                raise PlanError(f"row {row} has {len(items)} items, but item {direct[0]} writes the output itself")
            want = [int(self.item_partial[i]) + row - int(self.item_q_begin[i]) for i in items if i not in direct]
            if partials != want:
                raise PlanError(f"row {row} merges partials {partials}, its items write {want}")
            if any(not 0 <= p < self.num_partials or seen[p] for p in want):
                raise PlanError(f"row {row}: a partial is out of range or written twice")
            seen[want] = True
        if not seen.all():
            raise PlanError("a partial is never written")


def build_plan(
    *,
    paths: Sequence[Int32Array],
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    kv_present: Sequence[int],
    chunk_size: int,
    options: PlanOptions | None = None,
) -> AttentionPlan:
    """Plan one step; pure.

    Two sequences share a chunk where their paths hold the same slot at the same depth and both see all of it, so
    sequences with a common prefix must be neighbours (depth-first order of a prefix tree) to be found.

    Args:
        paths: B arrays of slots, root first; path i has at least ceil(kv_lens[i] / chunk_size) of them.
        kv_lens: keys of each sequence once this step's tokens are appended.
        q_lens: new tokens of each sequence, the last ones of its keys; at least 1.
        kv_present: keys of each sequence that are in the pool already; new tokens before that are not appended again.
        chunk_size: C.
        options: how to cut the work.
    Raises:
        PlanError: lengths that contradict each other.
    """
    options = options or PlanOptions()
    try:
        data = _cpu.build_plan(
            paths=[np.ascontiguousarray(path, np.int32) for path in paths],
            kv_lens=np.ascontiguousarray(kv_lens, np.int64),
            q_lens=np.ascontiguousarray(q_lens, np.int64),
            kv_present=np.ascontiguousarray(kv_present, np.int64),
            chunk_size=chunk_size,
            share=options.share,
            min_saved_tokens=options.min_saved_tokens,
            num_workers=options.num_workers,
            heads_per_worker_item=options.heads_per_worker_item,
            min_split_tokens=options.min_split_tokens,
            fixed_split_tokens=options.fixed_split_tokens or 0,
            spare_chunks=options.spare_chunks,
        )
    except ValueError as error:
        raise PlanError(str(error)) from error
    return AttentionPlan.from_data(data)


def _check_indptr(name: str, indptr: Int32Array, total: int) -> None:
    if len(indptr) < 1 or indptr[0] != 0 or indptr[-1] != total or (np.diff(indptr) < 0).any():
        raise PlanError(f"{name} does not rise from 0 to {total}: {indptr[:8].tolist()}...")
