import itertools

import pytest

from chunkserve.replica.chunk_hash import DIGEST_BYTES, chunk_digests, root_digest

ROOT = root_digest(model="m", dtype="bfloat16")


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128])
def test_only_full_chunks_have_digests(length: int) -> None:
    assert len(chunk_digests(ROOT, range(length), 64)) == length // 64


def test_a_digest_names_all_tokens_up_to_its_end() -> None:
    tokens = list(range(256))
    plain = chunk_digests(ROOT, tokens, 64)
    assert len(set(plain)) == 4
    assert all(len(digest) == DIGEST_BYTES for digest in plain)
    for changed in range(256):
        other = chunk_digests(ROOT, [*tokens[:changed], 999, *tokens[changed + 1 :]], 64)
        same = [one == two for one, two in zip(plain, other, strict=True)]
        assert same == [chunk < changed // 64 for chunk in range(4)]


def test_equal_chunks_after_different_ones_differ() -> None:
    one = chunk_digests(ROOT, [1] * 64 + [2] * 64, 64)
    assert one[1] not in chunk_digests(ROOT, [2] * 64 + [2] * 64, 64)
    assert one[1] != one[0]


def test_a_chain_can_be_continued() -> None:
    tokens = list(range(1000, 1256))
    whole = chunk_digests(ROOT, tokens, 64)
    assert whole[:2] + chunk_digests(whole[1], tokens[128:], 64) == whole


def test_token_order_and_chunk_size_matter() -> None:
    assert chunk_digests(ROOT, range(64), 64) != chunk_digests(ROOT, range(63, -1, -1), 64)
    assert chunk_digests(ROOT, range(64), 64)[0] != chunk_digests(ROOT, range(64), 32)[1]


def test_each_field_of_the_root_matters() -> None:
    fields = ["model", "dtype", "adapter", "salt"]
    base = dict.fromkeys(fields, "x")
    roots = {root_digest(**base), root_digest(**base, key=b"secret")}
    roots |= {root_digest(**(base | {field: "y"})) for field in fields}
    assert len(roots) == 6


def test_fields_cannot_be_shifted_into_each_other() -> None:
    texts = ["", "a", "b", "ab", "ba", "aa"]
    roots = [root_digest(model=m, dtype="d", adapter=a, salt=s) for m, a, s in itertools.product(texts, repeat=3)]
    assert len(set(roots)) == len(texts) ** 3


def test_it_is_the_same_in_every_process() -> None:
    assert chunk_digests(root_digest(model="m", dtype="d"), [7] * 16, 16)[0].hex() == "0198bba44b8ab15d009d81b82f7812f2"
