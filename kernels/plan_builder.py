"""The planner in Python: slower than its twin in csrc/plan_cpu.cpp, plainer, and the oracle of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .plan import PLAN_HEADER, PLAN_MAGIC, PLAN_VERSION, AttentionPlan, Int32Array, PlanError, PlanOptions


def build_plan_in_python(
    *,
    paths: Sequence[Int32Array],
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    kv_present: Sequence[int],
    chunk_size: int,
    options: PlanOptions | None = None,
) -> AttentionPlan:
    """As `plan.build_plan`, with the same arguments, result and errors."""
    options = options or PlanOptions()
    c = chunk_size
    b = len(paths)
    for i in range(b):
        if not 1 <= q_lens[i] <= kv_lens[i] <= len(paths[i]) * c:
            raise PlanError(
                f"sequence {i} has {q_lens[i]} new tokens, {kv_lens[i]} keys and {len(paths[i])} chunks of {c}"
            )
    q_indptr = np.zeros(b + 1, np.int64)
    np.cumsum(np.asarray(q_lens, np.int64), out=q_indptr[1:])
    t = int(q_indptr[-1])

    # Rows: position, and where the new K and V go.
    lens = np.asarray(kv_lens, np.int64)
    seq_of_row = np.repeat(np.arange(b), np.asarray(q_lens, np.int64))
    row_pos = (
        np.arange(t) - np.repeat(q_indptr[1:] - lens, np.asarray(q_lens, np.int64)) if b else np.zeros(0, np.int64)
    )
    write_slot = np.full(t, -1, np.int64)
    write_offset = np.full(t, -1, np.int64)
    for i in range(b):
        begin, end = max(int(lens[i]) - q_lens[i], kv_present[i]), int(lens[i])
        if begin < end:
            positions = np.arange(begin, end)
            last = int(q_indptr[i + 1])
            write_slot[last - len(positions) : last] = paths[i][positions // c]
            write_offset[last - len(positions) : last] = positions % c

    items = _cut_items(paths, lens, q_indptr, c, options)
    items_per_row = np.zeros(t, np.int64)
    for item in items:
        items_per_row[item.q_begin : item.q_end] += 1

    # A partial number per row of every item that is not alone on all of its rows.
    num_partials = 0
    item_partial = np.full(len(items), -1, np.int64)
    partials_per_row = np.zeros(t, np.int64)
    for k, item in enumerate(items):
        if (items_per_row[item.q_begin : item.q_end] > 1).any():
            item_partial[k] = num_partials
            num_partials += item.q_end - item.q_begin
            partials_per_row[item.q_begin : item.q_end] += 1
    partial_indptr = np.zeros(t + 1, np.int64)
    np.cumsum(partials_per_row, out=partial_indptr[1:])
    row_partials = np.zeros(num_partials, np.int64)
    cursor = partial_indptr[:-1].copy()
    for k in sorted(range(len(items)), key=lambda k: items[k].kv_begin):
        if item_partial[k] >= 0:
            rows = np.arange(items[k].q_begin, items[k].q_end)
            row_partials[cursor[rows]] = item_partial[k] + rows - items[k].q_begin
            cursor[rows] += 1

    tail_items = np.zeros(b, np.int64)
    for k, item in enumerate(items):
        ends_here = seq_of_row[item.q_begin], seq_of_row[item.q_end - 1]
        for i in range(int(ends_here[0]), int(ends_here[1]) + 1):
            if item.kv_begin + item.kv_len == lens[i]:
                tail_items[i] = k

    chunk_slots = []
    for item in items:
        end = item.kv_begin + item.kv_len
        slots = paths[item.seq][item.kv_begin // c : -(-end // c)]
        # Places for chunks to come: where one row alone reads the last keys of a sequence, and all sequences decode.
        grows = t == b and item.q_end - item.q_begin == 1 and end == lens[item.seq]
        chunk_slots.append(np.append(slots, np.repeat(slots[-1:], options.spare_chunks)) if grows else slots)
    chunk_indptr = np.zeros(len(items) + 1, np.int64)
    np.cumsum([len(s) for s in chunk_slots], out=chunk_indptr[1:])
    header = np.zeros(PLAN_HEADER, np.int64)
    header[:8] = (PLAN_MAGIC, PLAN_VERSION, c, b, t, len(items), int(chunk_indptr[-1]), num_partials)
    header[8] = options.fixed_split_tokens or 0
    parts: list[NDArray[np.int64]] = [
        header,
        q_indptr,
        row_pos,
        write_slot,
        write_offset,
        partial_indptr,
        row_partials,
        np.array([item.q_begin for item in items], np.int64),
        np.array([item.q_end for item in items], np.int64),
        np.array([item.kv_begin for item in items], np.int64),
        np.array([item.kv_len for item in items], np.int64),
        item_partial,
        chunk_indptr,
        *[np.asarray(s, np.int64) for s in chunk_slots],
        tail_items,
    ]
    return AttentionPlan.from_data(np.concatenate(parts).astype(np.int32))


@dataclass(frozen=True, slots=True)
class _Item:
    seq: int  # a sequence whose path holds the chunks
    q_begin: int
    q_end: int
    kv_begin: int
    kv_len: int


def _cut_items(
    paths: Sequence[Int32Array], lens: NDArray[np.int64], q_indptr: NDArray[np.int64], c: int, options: PlanOptions
) -> list[_Item]:
    """Segments of the tree, cut into items, longest work first."""
    b = len(paths)
    shared = _shared_chunks(paths, lens, c) if options.share and b > 1 else np.zeros(max(b - 1, 0), np.int64)
    if options.fixed_split_tokens is not None:
        shared = shared // max(options.fixed_split_tokens // c, 1) * max(options.fixed_split_tokens // c, 1)
    segments: list[_Item] = []
    stack = [(0, b, 0)] if b else []
    while stack:
        i, j, start = stack.pop()
        if j - i == 1:
            segments.append(_Item(i, int(q_indptr[i]), int(q_indptr[j]), start * c, int(lens[i]) - start * c))
            continue
        depth = int(shared[i : j - 1].min())
        if (depth - start) * c * (j - i - 1) >= max(options.min_saved_tokens, 1):
            segments.append(_Item(i, int(q_indptr[i]), int(q_indptr[j]), start * c, (depth - start) * c))
            start = depth
        borders = (i + 1 + np.flatnonzero(shared[i : j - 1] == depth)).tolist()
        stack.extend((lo, hi, start) for lo, hi in zip([i, *borders], [*borders, j], strict=True))
    # A sequence that ends with a shared chunk has nothing of its own left.
    segments = [s for s in segments if s.kv_len > 0]

    pieces = [piece for s in segments for piece in _split(s, c, _piece_tokens(segments, c, options), options)]
    pieces.sort(key=lambda s: (-(s.q_end - s.q_begin) * s.kv_len, s.q_begin, s.kv_begin))
    return pieces


def _shared_chunks(paths: Sequence[Int32Array], lens: NDArray[np.int64], c: int) -> NDArray[np.int64]:
    """[B - 1] leading full chunks that each sequence has in common with the next."""
    out = np.zeros(len(paths) - 1, np.int64)
    for i in range(len(paths) - 1):
        depth = int(min(lens[i], lens[i + 1])) // c
        differs = paths[i][:depth] != paths[i + 1][:depth]
        first = int(differs.argmax()) if depth else 0
        out[i] = first if depth and differs[first] else depth
    return out


def _piece_tokens(segments: Sequence[_Item], c: int, options: PlanOptions) -> int:
    """Keys per piece so that the work spreads over all workers, in whole chunks."""
    if options.fixed_split_tokens is not None:
        return options.fixed_split_tokens
    total = sum(s.kv_len for s in segments)
    if options.num_workers == 1:
        return -(-max(total, 1) // c) * c
    # Two pieces per worker level out what the largest one leaves.
    wanted = -(-2 * options.num_workers // max(options.heads_per_worker_item, 1))
    tokens = max(-(-total // max(wanted, 1)), options.min_split_tokens)
    return -(-tokens // c) * c


def _split(segment: _Item, c: int, piece_tokens: int, options: PlanOptions) -> list[_Item]:
    """Cut a segment at absolute multiples of `piece_tokens`; many query tokens are parallel enough without a cut."""
    many_rows = segment.q_end - segment.q_begin > 64 and options.fixed_split_tokens is None
    end = segment.kv_begin + segment.kv_len
    if many_rows or (segment.kv_len <= piece_tokens and options.fixed_split_tokens is None):
        return [segment]
    borders = [segment.kv_begin, *range((segment.kv_begin // piece_tokens + 1) * piece_tokens, end, piece_tokens), end]
    return [_Item(segment.seq, segment.q_begin, segment.q_end, lo, hi - lo) for lo, hi in pairwise(borders)]
