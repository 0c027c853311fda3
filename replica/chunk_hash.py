"""The keyed hash chain over full chunks of tokens: one name per prefix, the same in tree, replica and router. No torch.

A chunk's digest names the chunk and all tokens before it, and everything else that its K and V depend on. Two prompts
share leading digests exactly as far as they share full chunks in the prefix tree (ChunkAttention section 3.1).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 16

assert array("i").itemsize == 4, "token ids are hashed as 32-bit integers"


def root_digest(*, model: str, dtype: str, adapter: str = "", salt: str = "", key: bytes = b"") -> bytes:
    """The begin of the chains of one root of the prefix tree.

    Args:
        model: identity of weights and tokenizer.
        dtype: of K and V.
        adapter: name of the adapter, if any.
        salt: requests with different salts share nothing.
        key: a secret of the server, at most 64 bytes; without it nobody can make a digest.
    Returns:
        [DIGEST_BYTES] bytes.
    """
    # Lengths go before the fields, so that no two lists of fields are one text.
    fields = [field.encode() for field in (model, dtype, adapter, salt)]
    text = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return blake2b(text, digest_size=DIGEST_BYTES, key=key, person=b"chunkserve root").digest()


def chunk_digests(parent: bytes, token_ids: Sequence[int], chunk_size: int) -> tuple[bytes, ...]:
    """Digests of the full chunks, first to last; a trailing part of a chunk has none.

    Args:
        parent: `root_digest`, or the digest of the chunk before the first of token_ids.
        token_ids: each from 0 to 2**31 - 1.
        chunk_size: tokens per chunk.
    """
    tokens = memoryview(array("i", token_ids)).cast("B")
    step = 4 * chunk_size
    digests = []
    for begin in range(0, len(token_ids) // chunk_size * step, step):
        # As the salt the parent costs nothing; before the tokens it would take one more block of the hash.
        parent = blake2b(tokens[begin : begin + step], digest_size=DIGEST_BYTES, salt=parent).digest()
        digests.append(parent)
    return tuple(digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkScheme:
    """How one deployment names its chunks: router and replicas agree if their schemes are equal.

    model, dtype, adapter, key: see `root_digest`. chunk_size: tokens per chunk.
    """

    model: str
    dtype: str
    chunk_size: int
    adapter: str = ""
    key: bytes = field(default=b"", repr=False)

    def root(self, salt: str) -> bytes:
        """Where the chains of one salt begin."""
        return root_digest(model=self.model, dtype=self.dtype, adapter=self.adapter, salt=salt, key=self.key)

    def digests(self, salt: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Digests of a prompt's full chunks."""
        return chunk_digests(self.root(salt), token_ids, self.chunk_size)

    @property
    def identity(self) -> str:
        """Equal for equal schemes; gives nothing away."""
        return f"{self.root('').hex()}/{self.chunk_size}"
