"""A digest of a prefix tree and of what was sampled, kept up as they change: equal on ranks that agree. No torch."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 8


class DigestChain:
    """A hash over everything noted so far; each digest continues the one before it."""

    def __init__(self) -> None:
        self._digest = bytes(DIGEST_BYTES)
        self._noted = array("q")

    def note(self, *numbers: int) -> None:
        """Numbers of 64 bits."""
        self._noted.extend(numbers)

    def note_all(self, numbers: Iterable[int]) -> None:
        self._noted.extend(numbers)

    def digest(self) -> bytes:
        """Of all that was noted."""
        if self._noted:
            self._digest = blake2b(self._noted.tobytes(), digest_size=DIGEST_BYTES, salt=self._digest).digest()
            del self._noted[:]
        return self._digest
