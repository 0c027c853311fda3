"""Slots of the KV memory: which are free, which hold a chunk."""


class PoolFull(Exception):
    """No slot is free, and nothing may be evicted."""


class ChunkPool:
    """A fixed number of slots, handed out one by one.

    Invariant (see `check`): every slot is in exactly one of the free list and the used list.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        # Taken from the end, so that low slots are used first and a freed slot is used again while it is in cache.
        self._free = list(range(num_slots - 1, -1, -1))
        self._used = [False] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def allocate(self) -> int:
        """A free slot.

        Raises:
            PoolFull: there is none.
        """
        if not self._free:
            raise PoolFull(f"all {self.num_slots} slots are in use")
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        assert self._used[slot], f"slot {slot} is freed twice"
        self._used[slot] = False
        self._free.append(slot)

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free), "a slot is in the free list twice"
        assert all(not self._used[slot] for slot in self._free), "a used slot is in the free list"
        assert self.num_used == sum(self._used), "a slot is in neither list"
