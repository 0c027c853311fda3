"""The prefix tree: chunks of tokens whose K and V are kept once for all sequences that begin with them.

Source: ChunkAttention section 3.1 (arXiv 2402.15220). Beyond the paper: chunks are retained after their last sequence
and evicted least recently used first; a chunk that matches in part is copied instead of computed again; the last chunk
of a prompt may be shared too.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .chunk_journal import ChunkJournal
from .chunk_pool import ChunkPool, PoolFull
from .tree_digest import DigestChain

# A prompt that shares fewer tokens than this with a chunk that is being computed does not wait for it.
_WAIT_FRACTION = 4  # of a chunk: a quarter

# Slots whose chunks go into the audit with each step, in turns: smaller pools are looked at as a whole.
_AUDIT_SLOTS = 64

# What K and V depend on besides the tokens (salt, adapter); or the number of a request that shares with nobody: chunks
# under such a private root are freed after use, and no journal hears of them.
RootKey = str | int


@dataclass(slots=True, eq=False)
class Node:
    """One chunk in the tree.

    node_id: rises with creation; sorting paths by it gives a depth-first order.
    slot: the chunk's place in the pool; -1 at a root.
    tokens: up to C token ids; only a full node has children.
    num_ready: leading tokens whose K and V are computed on every layer. The node is pending until all are.
    num_refs: running sequences at or below this node.
    last_used: logical time of the last release or copy, for eviction.
    is_private: whether it is, or lies below, a private root.
    key: the tokens under which the parent finds this node; None while it is not to be found.
    """

    node_id: int
    slot: int
    parent: "Node | None"
    tokens: list[int]
    num_ready: int = 0
    num_refs: int = 0
    last_used: int = 0
    is_private: bool = False
    key: tuple[int, ...] | None = None
    num_children: int = 0
    # Of the full, computed chunk and all before it; the root's own at a root. None without a journal.
    digest: bytes | None = None
    # Children that can be found, sorted by key: the longest common prefix with anything is at a neighbour.
    index: list["Node"] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being computed here: the node is ready, or gone."""
        return self.parent is None or self.num_ready == len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is in the tree.

    nodes: leading full, ready chunks.
    partial: the node that continues them for `partial_tokens` tokens, or None; it is copied, or taken over if nobody
        uses it and all of it matches (`adopt`).
    waits_for: a chunk of this prompt that another sequence is computing right now: better join when it `is_settled`.
    """

    root_key: RootKey
    tokens: tuple[int, ...]
    nodes: tuple[Node, ...]
    partial: Node | None = None
    partial_tokens: int = 0
    adopt: bool = False
    waits_for: Node | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first num_rows tokens of a chunk; copies run in order, before anything is appended."""

    src_slot: int
    dst_slot: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A sequence's place in the tree.

    path: nodes that cover the whole prompt.
    kv_present: leading tokens whose K and V are in the pool, once `copy` is done.
    num_cached: tokens that need no computation: kv_present, but at least one is left to compute for its logits.
    """

    path: list[Node]
    kv_present: int
    num_cached: int
    copy: Copy | None


class PrefixTree:
    """Chunks of all sequences, running and remembered, over one pool.

    Args:
        pool: gives and takes the slots.
        chunk_size: C, tokens per chunk.
        share: False keeps every sequence on chunks of its own (for comparison).
        retain: keep chunks after their last sequence until the room is needed; False frees them at once, as the paper.
        journal: hears of chunks that are full and computed, and of their end.
        audit: hears of every change; trees with equal changes have equal digests.

    Invariants (see `check`): free slots + nodes = slots; no slot twice; num_refs equals the running sequences at or
    below a node; only full nodes have children; a pending node serves one sequence; nodes nobody refers to are ready.
    """

    def __init__(
        self,
        pool: ChunkPool,
        chunk_size: int,
        *,
        share: bool = True,
        retain: bool = True,
        journal: ChunkJournal | None = None,
        audit: DigestChain | None = None,
    ) -> None:
        self.pool = pool
        self.chunk_size = chunk_size
        self.share = share
        self.retain = retain and share
        self._journal = journal if share else None
        self.audit = audit
        self._audited_slot = 0
        self._in_slot: list[Node | None] = [None] * pool.num_slots
        self._roots: dict[RootKey, Node] = {}
        self._root_keys: dict[int, RootKey] = {}  # by node_id
        self._next_id = 0
        self._clock = 0
        self._num_idle = 0  # nodes without a running sequence
        self._idle_leaves: list[tuple[int, int, Node]] = []  # heap; stale entries are skipped when popped
        self._paths: dict[int, list[Node]] = {}  # by id() of the path: what the running sequences hold, for check()
        self.num_evictions = 0

    @property
    def num_nodes(self) -> int:
        return self.pool.num_used

    @property
    def num_idle(self) -> int:
        """Chunks that no running sequence uses; all of them can be evicted."""
        return self._num_idle

    # -- read ----------------------------------------------------------------------------------------------------------

    def match(self, root_key: RootKey, tokens: Sequence[int]) -> Match:
        """What of a prompt is there; changes nothing.

        Args:
            root_key: where to look.
            tokens: the whole prompt, at least one token.
        """
        key = tuple(tokens)
        node = self._roots.get(root_key)
        nodes: list[Node] = []
        if node is None or not self.share:
            return Match(root_key, key, ())
        c = self.chunk_size
        while True:
            rest = key[len(nodes) * c : (len(nodes) + 1) * c]
            best, common = self._closest_child(node, rest)
            if best is None:
                return Match(root_key, key, tuple(nodes))
            if common == c and best.num_ready == c:
                nodes.append(best)
                node = best
                continue
            ready = min(common, best.num_ready)
            waits_for = best if common - ready >= min(c // _WAIT_FRACTION, len(rest)) else None
            adopt = best.num_refs == 0 and best.num_children == 0 and common == len(best.tokens) == best.num_ready
            if not adopt and len(nodes) * c + ready == len(key):
                ready -= 1  # the last token is computed, so that there are logits
            if ready == 0:
                return Match(root_key, key, tuple(nodes), waits_for=waits_for)
            return Match(root_key, key, tuple(nodes), best, ready, adopt, waits_for)

    def num_new(self, match: Match) -> int:
        """Slots that `join` will take for the match."""
        return -(-len(match.tokens) // self.chunk_size) - len(match.nodes) - match.adopt

    def can_join(self, match: Match, spare: int = 0) -> bool:
        """Whether `join` finds enough slots and leaves `spare`, by evicting what nobody uses if need be."""
        held = [*match.nodes, match.partial] if match.adopt and match.partial else match.nodes
        idle = self._num_idle - sum(node.num_refs == 0 for node in held if node is not None)
        return self.num_new(match) + spare <= self.pool.num_free + idle

    # -- change --------------------------------------------------------------------------------------------------------

    def join(self, match: Match) -> Joined:
        """Put a sequence's prompt into the tree. The match must be fresh: nothing changed since.

        Raises:
            PoolFull: `can_join` is false; nothing has changed.
        """
        if not self.can_join(match):
            raise PoolFull(f"{self.num_new(match)} slots wanted, {self.pool.num_free} free, {self._num_idle} idle")
        c, tokens = self.chunk_size, match.tokens
        path = list(match.nodes)
        if match.partial is not None and match.adopt:
            path.append(match.partial)
        for node in path:
            self._add_ref(node)
        copy: Copy | None = None
        kv_present = len(match.nodes) * c + match.partial_tokens
        if match.partial is not None and match.adopt:
            self._unindex(match.partial)
            match.partial.tokens = list(tokens[len(match.nodes) * c : len(path) * c])
            self._note(match.partial)
            self._insert(match.partial)
        parent = path[-1] if path else self._root(match.root_key)
        for begin in range(len(path) * c, len(tokens), c):
            node = self._new_node(parent, list(tokens[begin : begin + c]))
            if match.partial is not None and begin < kv_present:
                copy = Copy(match.partial.slot, node.slot, match.partial_tokens)
                node.num_ready = match.partial_tokens
                self._touch(match.partial)
            self._insert(node)
            path.append(node)
            parent = node
        for node in match.nodes:
            self._note(node, full=False)
        self._paths[id(path)] = path
        return Joined(path, kv_present, min(kv_present, len(tokens) - 1), copy)

    def can_append(self, path: list[Node]) -> bool:
        """Whether `append` finds a slot, should it need one."""
        return len(path[-1].tokens) < self.chunk_size or self.pool.num_free + self._num_idle > 0

    def append(self, path: list[Node], token: int) -> bool:
        """Add a decoded token to a sequence; True if that began a new chunk.

        Raises:
            PoolFull: `can_append` is false; nothing has changed.
        """
        leaf = path[-1]
        if len(leaf.tokens) < self.chunk_size:
            assert leaf.num_refs == 1, "a chunk that is not full has one sequence"
            leaf.tokens.append(token)
            if self.audit is not None:
                self.audit.note(leaf.node_id, token)
            return False
        if not self.can_append(path):
            raise PoolFull(f"all {self.pool.num_slots} slots are in use by running sequences")
        path.append(self._new_node(leaf, [token]))
        return True

    def commit(self, path: list[Node], begin: int, end: int) -> bool:
        """K and V of the sequence's tokens [begin, end) are computed.

        A chunk that a sequence filled by decoding, and that the tree has already, is dropped in favour of the one that
        is there. Only the last chunk can be such a one.

        Returns:
            Whether the last node of the path was exchanged.
        """
        c = self.chunk_size
        for k in range(begin // c, -(-end // c)):
            path[k].num_ready = max(path[k].num_ready, min(end - k * c, c))
            if path[k].num_ready == c:
                self._tell(path[k])
        leaf = path[-1]
        if leaf.num_ready < c or not self.share or leaf.key == tuple(leaf.tokens):
            return False
        self._unindex(leaf)
        twin = self._ready_twin(leaf)
        if twin is None:
            self._insert(leaf)
            return False
        self._add_ref(twin)
        path[-1] = twin
        leaf.num_refs = 0
        self._num_idle += 1
        self._delete(leaf)
        return True

    def leave(self, path: list[Node]) -> None:
        """A sequence has ended, or is preempted. What is not computed goes, the rest stays as long as there is room."""
        assert self._paths.pop(id(path), None) is path, "the path is not in the tree"
        self._clock += 1
        for node in reversed(path):
            node.num_refs -= 1
            if node.num_refs:
                continue
            self._num_idle += 1
            node.last_used = self._clock
            del node.tokens[node.num_ready :]
            if node.num_children:
                continue
            self._unindex(node)
            if not self.retain or node.is_private or not node.tokens or self._is_covered(node):
                self._delete(node)
                continue
            self._insert(node)
            heapq.heappush(self._idle_leaves, (node.last_used, node.node_id, node))

    def clear(self) -> int:
        """Evict everything that nobody uses; the number of chunks freed."""
        freed = self._num_idle
        while self._num_idle:
            self._evict()
        return freed

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _root(self, root_key: RootKey) -> Node:
        root = self._roots.get(root_key)
        if root is None:
            root = self._roots[root_key] = Node(self._take_id(), -1, None, [], is_private=isinstance(root_key, int))
            self._root_keys[root.node_id] = root_key
            if self._journal is not None and isinstance(root_key, str):
                root.digest = self._journal.root(root_key)
        return root

    def audit_slots(self) -> None:
        """Note the next few slots as they are now, so that a change which no operation made comes to light."""
        if self.audit is None:
            return
        slots = self.pool.num_slots
        for i in range(min(_AUDIT_SLOTS, slots)):
            node = self._in_slot[(self._audited_slot + i) % slots]
            if node is not None:
                self._note(node)
        self._audited_slot = (self._audited_slot + _AUDIT_SLOTS) % slots

    def _note(self, node: Node, *, full: bool = True) -> None:
        if self.audit is None:
            return
        assert node.parent is not None
        self.audit.note(node.node_id, node.slot, node.parent.node_id, node.num_refs, node.num_ready, node.last_used)
        if full:
            self.audit.note_all(node.tokens)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _new_node(self, parent: Node, tokens: list[int]) -> Node:
        parent.num_children += 1  # first, so that the eviction cannot take the parent
        if not self.pool.num_free:
            self._evict()
        node = Node(self._take_id(), self.pool.allocate(), parent, tokens, num_refs=1, is_private=parent.is_private)
        self._in_slot[node.slot] = node
        self._note(node)
        return node

    def _add_ref(self, node: Node) -> None:
        self._num_idle -= node.num_refs == 0
        node.num_refs += 1

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock
        if node.num_refs == 0 and node.num_children == 0 and node.parent is not None:
            heapq.heappush(self._idle_leaves, (node.last_used, node.node_id, node))

    def _evict(self) -> None:
        """Free the least recently used leaf that nobody uses."""
        while self._idle_leaves:
            last_used, _, node = heapq.heappop(self._idle_leaves)
            alive = node.parent is not None and node.num_refs == 0 and node.num_children == 0
            if alive and node.last_used == last_used:
                self.num_evictions += 1
                self._delete(node)
                return
        raise AssertionError("nothing to evict, though chunks are idle")

    def _delete(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert node.num_refs == 0
        assert node.num_children == 0
        self._unindex(node)
        if self._journal is not None and node.digest is not None:
            self._journal.evicted(node.digest)
        self._note(node, full=False)
        self._in_slot[node.slot] = None
        node.parent = None
        parent.num_children -= 1
        self._num_idle -= 1
        self.pool.free(node.slot)
        if parent.num_children or parent.num_refs:
            return
        if parent.parent is None:
            del self._roots[self._root_keys.pop(parent.node_id)]
        elif self.retain:
            heapq.heappush(self._idle_leaves, (parent.last_used, parent.node_id, parent))

    def _tell(self, node: Node) -> None:
        """A chunk is full and computed."""
        if self._journal is None or node.digest is not None or node.is_private:
            return
        assert node.parent is not None
        assert node.parent.digest is not None, "a chunk is computed before the one it continues"
        node.digest = self._journal.stored(node.parent.digest, node.tokens, is_first=node.parent.parent is None)

    def _insert(self, node: Node) -> None:
        if self.share and node.parent is not None:
            node.key = tuple(node.tokens)
            insort(node.parent.index, node, key=_key)

    def _unindex(self, node: Node) -> None:
        if node.key is None or node.parent is None:
            return
        index = node.parent.index
        at = bisect_left(index, node.key, key=_key)
        while index[at] is not node:
            at += 1
        del index[at]
        node.key = None

    def _closest_child(self, node: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child with the longest common prefix (ready ones first), and its length; (None, 0) without any."""
        best, common = None, 0
        if not tokens:
            return best, common
        at = bisect_left(node.index, tokens, key=_key)
        low, high = max(at - 1, 0), at
        # Of equal keys, as sequences with one prompt leave them, a ready one serves best.
        while high < len(node.index) and node.index[high].key == tokens:
            high += 1
        for child in node.index[low : high + 1]:
            length = _common_prefix(child.tokens, tokens)
            if (length, child.num_ready) > (common, best.num_ready if best else -1):
                best, common = child, length
        return best, common

    def _ready_twin(self, node: Node) -> Node | None:
        assert node.parent is not None
        twin, common = self._closest_child(node.parent, tuple(node.tokens))
        return twin if twin is not None and common == self.chunk_size == twin.num_ready else None

    def _is_covered(self, node: Node) -> bool:
        """Whether a sibling holds all of an unused node's tokens, computed."""
        assert node.parent is not None
        index, tokens = node.parent.index, tuple(node.tokens)
        at = bisect_left(index, tokens, key=_key)
        sibling = index[at] if at < len(index) else None
        length = len(tokens)
        return sibling is not None and sibling.num_ready >= length and tuple(sibling.tokens[:length]) == tokens

    # -- proof ---------------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes that can be found or are in use, roots left out, parents first."""
        seen: set[int] = set()
        stack = [child for root in self._roots.values() for child in root.index]
        stack += [node for path in self._paths.values() for node in path]
        while stack:
            node = stack.pop()
            if node.node_id not in seen:
                seen.add(node.node_id)
                yield node
                stack.extend(node.index)

    def check(self) -> None:
        """Assert the invariants; linear in the tree."""
        self.pool.check()
        nodes = list(self.nodes())
        refs: dict[int, int] = {}
        for path in self._paths.values():
            for parent, node in zip([None, *path[:-1]], path, strict=True):
                refs[node.node_id] = refs.get(node.node_id, 0) + 1
                assert parent is None or node.parent is parent, "a path is not a line in the tree"
        children: dict[int, int] = {}
        for node in nodes:
            assert node.parent is not None
            children[node.parent.node_id] = children.get(node.parent.node_id, 0) + 1
            assert 0 < len(node.tokens) <= self.chunk_size
            assert 0 <= node.num_ready <= len(node.tokens)
            assert node.num_refs == refs.get(node.node_id, 0), "reference count is off"
            assert node.num_refs or node.num_ready == len(node.tokens), "an idle chunk is not computed"
            assert node.num_refs <= 1 or len(node.tokens) == self.chunk_size == node.num_ready, "shared, but not ready"
            assert node.key is None or tuple(node.tokens[: len(node.key)]) == node.key, "found under other tokens"
            assert node.num_children == 0 or len(node.tokens) == self.chunk_size, "children under a part of a chunk"
            assert [_key(n) for n in node.index] == sorted(_key(n) for n in node.index)
        assert all(node.num_children == children.get(node.node_id, 0) for node in nodes)
        slots = [node.slot for node in nodes]
        assert len(set(slots)) == len(slots), "two chunks in one slot"
        assert len(slots) == self.pool.num_used, "a slot is used, but not in the tree"
        assert all(self._in_slot[node.slot] is node for node in nodes), "a slot holds another chunk than the tree says"
        assert len(slots) == sum(node is not None for node in self._in_slot), "a free slot holds a chunk"
        assert self._num_idle == sum(node.num_refs == 0 for node in nodes)
        assert all(root.num_children for root in self._roots.values()), "an empty root stays"
        assert all(node.num_refs for node in nodes if node.is_private), "a private chunk stays after use"


def _key(node: Node) -> tuple[int, ...]:
    assert node.key is not None
    return node.key


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if tuple(a[:n]) == tuple(b[:n]):
        return n
    for i in range(n):
        if a[i] != b[i]:
            return i
    return n
