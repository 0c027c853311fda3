"""What a replica's tree holds, as digests, and the log of how that changed: what routers learn about its cache."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from .chunk_hash import ChunkScheme, chunk_digests
from .protocol import ChunkDelta

# About a minute of changes on a fast replica; who asks for older ones gets a snapshot.
_LOG_CHANGES = 65_536


class ChunkJournal:
    """Digests of the full, computed chunks in one tree. The engine's thread writes; any thread may ask.

    Two nodes may hold the same chunk; it is stored with the first and gone with the last of them.

    Args:
        scheme: how chunks are named.
        epoch: tells this journal from those of earlier processes and caches.
    """

    def __init__(self, scheme: ChunkScheme, epoch: int) -> None:
        self.scheme = scheme
        self.epoch = epoch
        self._held: dict[bytes, tuple[int, bytes | None]] = {}  # digest -> copies, parent; parents come first
        self._log: deque[tuple[bytes, bytes | None, bool]] = deque(maxlen=_LOG_CHANGES)
        self._sequence = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def sequence(self) -> int:
        """Changes so far."""
        return self._sequence

    def root(self, salt: str) -> bytes:
        return self.scheme.root(salt)

    def stored(self, parent: bytes, tokens: Sequence[int], *, is_first: bool) -> bytes:
        """A chunk is full and computed.

        Args:
            parent: digest of the chunk before it, or of its root.
            is_first: whether the parent is a root.
        Returns:
            Its digest.
        """
        (digest,) = chunk_digests(parent, tokens, self.scheme.chunk_size)
        with self._lock:
            copies, told = self._held.get(digest, (0, None if is_first else parent))
            self._held[digest] = (copies + 1, told)
            if not copies:
                self._write(digest, told, True)
        return digest

    def evicted(self, digest: bytes) -> None:
        """A node that held this chunk is gone."""
        with self._lock:
            copies, parent = self._held[digest]
            if copies > 1:
                self._held[digest] = (copies - 1, parent)
                return
            del self._held[digest]
            self._write(digest, None, False)

    def delta(self, since: tuple[int, int] | None) -> ChunkDelta:
        """Changes since an earlier delta's (epoch, sequence), or all that is there."""
        with self._lock:
            behind = self._sequence - since[1] if since is not None and since[0] == self.epoch else -1
            if 0 <= behind <= len(self._log):
                changes = tuple(self._log[i] for i in range(len(self._log) - behind, len(self._log)))
                return ChunkDelta(epoch=self.epoch, sequence=self._sequence, is_snapshot=False, changes=changes)
            changes = tuple((digest, parent, True) for digest, (_, parent) in self._held.items())
            return ChunkDelta(epoch=self.epoch, sequence=self._sequence, is_snapshot=True, changes=changes)

    def uncached_tokens(self, prompts: Iterable[tuple[Sequence[bytes], int]]) -> int:
        """Tokens to compute for prompts that wait, in order: each finds what is held and what those before it compute.

        Args:
            prompts: digests of the full chunks, and number of tokens, of each.
        """
        coming: set[bytes] = set()
        total = 0
        for digests, num_tokens in prompts:
            depth = _first_missing(digests, lambda digest: digest in self._held or digest in coming)
            coming.update(digests[depth:])
            total += max(1, num_tokens - depth * self.scheme.chunk_size)
        return total

    def _write(self, digest: bytes, parent: bytes | None, is_stored: bool) -> None:
        self._log.append((digest, parent, is_stored))
        self._sequence += 1


def _first_missing(digests: Sequence[bytes], is_there: Callable[[bytes], bool]) -> int:
    low, high = 0, len(digests)
    while low < high:
        middle = (low + high) // 2
        if is_there(digests[middle]):
            low = middle + 1
        else:
            high = middle
    return low
