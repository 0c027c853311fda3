"""Which replica holds which chunks: what a router believes, and what replicas have told it."""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkserve.replica.chunk_hash import DIGEST_BYTES

# Of a chain that is only expected so many chunks are noted: 65,536 tokens tell where to go, and deciding about 240,000
# would take twice its 5 ms. What the replica then reports is noted whole.
_MAX_EXPECTED = 1024
# Entries that the hand passes per inserted entry while bits are dead.
_SWEEP_PER_INSERT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What of a prompt is where.

    depths: [rows] leading chunks that each replica holds, or will hold once what was sent there is computed.
    num_common: leading chunks that more than half of the replicas hold. They say nothing about where to go; the chunk
        after them does.
    """

    depths: NDArray[np.int64]
    num_common: int


class PrefixIndex:
    """Chunk digests to the replicas that hold them, as bit masks; bounded.

    A replica has a row (the caller's number for it) and a bit (ours). Emptying a replica gives it a new bit and leaves
    the old one dead, in O(1); the hand of the clock clears dead bits in passing, and then they serve again.

    Args:
        max_entries: bound on the chunks known; about 210 bytes each with up to 60 replicas. The least recently used
            goes first, tails of chains before their heads.

    Invariants (see `check`): each entry's parent is an entry, or it is the first of its chain; the number of children
    is right; only entries without children are dropped.

    A replica that holds a chunk holds its ancestors: trees evict leaves only.
    """

    def __init__(self, max_entries: int = 1_000_000) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}; expected at least 1 (routing_index_entries)")
        self.max_entries = max_entries
        self._at: dict[bytes, int] = {}  # digest -> place in the columns below
        self._digest: list[bytes | None] = []
        self._stored: list[int] = []  # bits of replicas that told us so
        self._expected: list[int] = []  # bits of replicas that we sent it to
        self._expected_until_s = array("d")
        self._parent = array("i")
        self._num_children = array("i")
        self._used = bytearray()  # since the hand came by
        self._free: list[int] = []
        self._hand = 0
        self._victim = -1  # the parent of what was dropped last: a tail goes as a whole
        self._bit_of_row: dict[int, int] = {}
        self._row_of_bit: NDArray[np.int64] = np.full(64, -1, np.int64)
        self._alive = 0  # mask of bits in use
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._dying: list[int] = []  # dead since this revolution of the hand
        self._dead: list[int] = []  # dead since the last one; clear when the hand is round
        self.num_evictions = 0
        self.num_stored = 0  # entries that some replica told us of; of dead ones until the hand comes by

    def __len__(self) -> int:
        return len(self._at)

    @property
    def num_bytes(self) -> int:
        """Memory, about: the columns as they are, and for each entry a digest and two masks."""
        columns = (self._at, self._digest, self._stored, self._expected, self._expected_until_s, self._parent)
        mask = sys.getsizeof((1 << max(1, self._num_bits)) - 1)
        return sum(map(sys.getsizeof, columns)) + len(self._at) * (sys.getsizeof(bytes(DIGEST_BYTES)) + mask)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def add_replica(self, row: int) -> None:
        """A replica that holds nothing yet."""
        assert row not in self._bit_of_row, f"row {row} is in use"
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit, self._num_bits = self._num_bits, self._num_bits + 1
            if bit == len(self._row_of_bit):
                self._row_of_bit = np.concatenate([self._row_of_bit, np.full(bit, -1, np.int64)])
        self._bit_of_row[row] = bit
        self._row_of_bit[bit] = row
        self._alive |= 1 << bit

    def remove_replica(self, row: int) -> None:
        """A replica is gone, and all it held with it, at once."""
        bit = self._bit_of_row.pop(row)
        self._row_of_bit[bit] = -1
        self._alive &= ~(1 << bit)
        self._dying.append(bit)

    def clear_replica(self, row: int) -> None:
        """A replica has lost all its chunks."""
        self.remove_replica(row)
        self.add_replica(row)

    # -- chunks --------------------------------------------------------------------------------------------------------

    def match(self, digests: Sequence[bytes], now_s: float, num_rows: int) -> PrefixMatch:
        """How deep each replica's chunks reach into a prompt; depths are 0 for rows that are not there.

        Args:
            digests: of the prompt's full chunks.
            now_s: expected chunks count until their time.
            num_rows: rows below it are answered.
        """
        depths = np.zeros(num_rows, np.int64)
        half = len(self._bit_of_row) / 2
        # Whoever holds a chunk holds those before it, so depths are found by bisection: long prompts cost little.
        deepest, found = 0, len(digests) + 1
        step = 1
        while deepest + 1 < found:
            middle = min(deepest + step, (deepest + found) // 2)
            step *= 2
            if self._holders(digests[middle - 1], now_s):
                deepest = middle
            else:
                found = middle
        if not self._alive:
            return PrefixMatch(depths=depths, num_common=0)
        last = self._holders(digests[deepest - 1], now_s) if deepest else self._alive
        depths[self._rows(last)] = deepest
        num_common = deepest if last.bit_count() > half else 0
        spans = [(0, self._alive, deepest, last)]
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            if low_mask == high_mask:
                continue
            if high == low + 1:
                depths[self._rows(low_mask & ~high_mask)] = low
                if low_mask.bit_count() > half >= high_mask.bit_count():
                    num_common = low
                continue
            middle = (low + high) // 2
            mask = self._holders(digests[middle - 1], now_s) & low_mask | high_mask
            spans += ((low, low_mask, middle, mask), (middle, mask, high, high_mask))
        return PrefixMatch(depths=depths, num_common=num_common)

    def expect(self, digests: Sequence[bytes], row: int, until_s: float, now_s: float) -> None:
        """A replica will compute this chain; believed until then, as far as `_MAX_EXPECTED` chunks."""
        bit = 1 << self._bit_of_row[row]
        digests = digests[:_MAX_EXPECTED]
        known = bisect_left(range(len(digests)), True, key=lambda i: not self._is_stored(digests[i], bit))
        parent = self._at[digests[known - 1]] if known else -1
        at_of, expected, expected_until_s = self._at, self._expected, self._expected_until_s
        for digest in digests[known:]:
            at = at_of.get(digest)
            if at is None:
                at = self._insert(digest, parent)
                if at is None:
                    return
            before_s = expected_until_s[at]
            expected[at] = expected[at] | bit if before_s > now_s else bit
            if until_s > before_s:
                expected_until_s[at] = until_s
            parent = at

    def store(self, digests: Iterable[bytes], row: int, parent: bytes | None = None) -> None:
        """A replica holds this chain, which continues `parent`, or begins at the root.

        Nothing happens where the parent is not known: without it the chain cannot be found.
        """
        bit = 1 << self._bit_of_row[row]
        at_parent = -1 if parent is None else self._at.get(parent)
        if at_parent is None:
            return
        ancestor = at_parent
        while ancestor >= 0 and not self._stored[ancestor] & bit:
            self.num_stored += not self._stored[ancestor]
            self._stored[ancestor] |= bit
            ancestor = self._parent[ancestor]
        for digest in digests:
            at = self._at.get(digest)
            if at is None:
                at = self._insert(digest, at_parent)
                if at is None:
                    return
            self.num_stored += not self._stored[at]
            self._stored[at] |= bit
            self._expected[at] &= ~bit
            at_parent = at

    def evict(self, digests: Iterable[bytes], row: int) -> None:
        """A replica does not hold these chunks any more."""
        keep = ~(1 << self._bit_of_row[row])
        for digest in digests:
            at = self._at.get(digest)
            if at is not None:
                self._keep(at, keep)

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _holders(self, digest: bytes, now_s: float) -> int:
        """Mask of the replicas that hold a chunk, or will."""
        at = self._at.get(digest)
        if at is None:
            return 0
        self._used[at] = 1
        holders = self._stored[at]
        if self._expected[at] and self._expected_until_s[at] > now_s:
            holders |= self._expected[at]
        return holders & self._alive

    def _keep(self, at: int, mask: int) -> None:
        """Forget all replicas of an entry but those of the mask."""
        if self._stored[at]:
            self._stored[at] &= mask
            self.num_stored -= not self._stored[at]
        self._expected[at] &= mask

    def _is_stored(self, digest: bytes, bit: int) -> bool:
        at = self._at.get(digest)
        return at is not None and bool(self._stored[at] & bit)

    def _rows(self, mask: int) -> NDArray[np.int64]:
        if mask & (mask - 1) == 0:
            return self._row_of_bit[mask.bit_length() - 1 : mask.bit_length()]
        raw = np.frombuffer(mask.to_bytes(-(-self._num_bits // 8), "little"), np.uint8)
        return self._row_of_bit[np.flatnonzero(np.unpackbits(raw, bitorder="little"))]

    def _insert(self, digest: bytes, parent: int) -> int | None:
        """A new entry; None if only its own ancestors could make room."""
        if self._dying or self._dead:
            for _ in range(_SWEEP_PER_INSERT):
                self._pass_by(parent)
        if len(self._at) >= self.max_entries and not self._make_room(parent):
            return None
        if self._free:
            at = self._free.pop()
            self._digest[at] = digest
            self._parent[at] = parent
        else:
            at = len(self._digest)
            self._digest.append(digest)
            self._stored.append(0)
            self._expected.append(0)
            self._expected_until_s.append(0.0)
            self._parent.append(parent)
            self._num_children.append(0)
            self._used.append(0)
        self._used[at] = 1
        self._at[digest] = at
        if parent >= 0:
            self._num_children[parent] += 1
        return at

    def _make_room(self, keep: int) -> bool:
        # Two revolutions: the first may find everything used.
        for _ in range(2 * len(self._digest) + 1):
            victim, self._victim = self._victim, -1
            if victim < 0 or victim == keep or self._used[victim] or self._num_children[victim]:
                victim = self._pass_by(keep)
            if victim >= 0 and self._digest[victim] is not None:
                self.num_evictions += 1
                self._drop(victim)
            if len(self._at) < self.max_entries:
                return True
        return False

    def _pass_by(self, keep: int) -> int:
        """Move the hand by one entry and tidy it up; its place if it may go, else -1."""
        if not self._digest:
            return -1
        # Downwards: chains lie head first, so their tails come first.
        self._hand -= 1
        if self._hand < 0:
            self._hand = len(self._digest) - 1
            self._free_bits += self._dead
            self._dead, self._dying = self._dying, []
        at = self._hand
        if self._digest[at] is None:
            return -1
        self._keep(at, self._alive)
        if at == keep or self._num_children[at]:
            self._used[at] = 0
            return -1
        if not self._stored[at] and not self._expected[at]:
            self._drop(at)
            return -1
        if self._used[at]:
            self._used[at] = 0
            return -1
        return at

    def _drop(self, at: int) -> None:
        digest, parent = self._digest[at], self._parent[at]
        assert digest is not None
        assert self._num_children[at] == 0
        del self._at[digest]
        self._digest[at] = None
        self._keep(at, 0)
        self._expected_until_s[at] = 0.0
        self._free.append(at)
        if parent >= 0:
            self._num_children[parent] -= 1
        self._victim = parent

    # -- proof ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants; linear in the entries."""
        children = [0] * len(self._digest)
        for digest, at in self._at.items():
            assert self._digest[at] == digest
            parent = self._parent[at]
            if parent >= 0:
                assert self._digest[parent] is not None, "an entry's parent is gone"
                children[parent] += 1
        assert children == list(self._num_children)
        assert len(self._at) + len(self._free) == len(self._digest)
        assert len(self._at) <= self.max_entries
        assert self.num_stored == sum(mask != 0 for mask in self._stored)
        bits = [*self._bit_of_row.values(), *self._free_bits, *self._dying, *self._dead]
        assert sorted(bits) == list(range(self._num_bits)), "a bit is lost, or has two meanings"
