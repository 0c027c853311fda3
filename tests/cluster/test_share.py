"""Parts cover everything once, in order, and differ by one at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkserve.cluster.share import HeadShare, Share


@given(st.integers(0, 200), st.integers(1, 17))
def test_parts_cover_everything_once(total: int, num_ranks: int) -> None:
    parts = [Share(total=total, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [i for part in parts for i in range(part.begin, part.end)] == list(range(total))
    sizes = [part.size for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_smollm_on_two_ranks() -> None:
    assert [Share(total=3, rank=rank, num_ranks=2).size for rank in range(2)] == [2, 1]


def test_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; there are 2 ranks"):
        Share(total=3, rank=2, num_ranks=2)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 40))
def test_query_heads_are_owned_once_and_their_kv_heads_are_there(num_kv_heads: int, group: int, num_ranks: int) -> None:
    num_heads = num_kv_heads * group
    if num_ranks > num_heads:
        with pytest.raises(ValueError, match="cannot share"):
            HeadShare.of(num_heads=num_heads, num_kv_heads=num_kv_heads, rank=0, num_ranks=num_ranks)
        return
    parts = [
        HeadShare.of(num_heads=num_heads, num_kv_heads=num_kv_heads, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    assert [q for part in parts for q in range(part.q_begin, part.q_end)] == list(range(num_heads))
    for part in parts:
        assert part.num_heads > 0
        assert {q // group for q in range(part.q_begin, part.q_end)} == set(range(part.kv_begin, part.kv_end))
        assert part.num_heads % part.num_kv_heads == 0
