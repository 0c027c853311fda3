"""Whatever rank 0 says, and whatever each rank is, all ranks hear it out of a sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkserve.cluster.control_rows import ControlRows, ControlRowsError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(num_ranks: int, dtype: torch.dtype = torch.float32, **sizes: int) -> list[ControlRows]:
    options = {"num_carriers": 4, "hidden_size": 24, "num_rows": 1, "status_bytes": 6, **sizes}
    return [ControlRows(rank=rank, num_ranks=num_ranks, dtype=dtype, **options) for rank in range(num_ranks)]


def run_step(ranks: list[ControlRows]) -> None:
    assert len({rank.num_open for rank in ranks}) == 1
    for carrier in range(ranks[0].num_open):
        sent = [rank.outgoing(carrier) for rank in ranks]
        rows = next((rows for rows in sent if rows is not None), None)
        if rows is None:
            zeros = torch.zeros_like(ranks[0]._out[0])
            assert [rank.incoming(carrier, zeros) for rank in ranks] == [not rank._peeks for rank in ranks]
            continue
        total = torch.stack([torch.zeros_like(rows) if one is None else one for one in sent]).sum(0)
        for rank in ranks:
            rank.incoming(carrier, total)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
def test_all_ranks_read_what_was_written(data: st.DataObject, num_ranks: int, dtype: torch.dtype) -> None:
    sizes = {
        "num_carriers": data.draw(st.integers(1, 5)),
        "hidden_size": data.draw(st.integers(3, 40)),
        "num_rows": data.draw(st.integers(1, 3)),
        "status_bytes": data.draw(st.integers(1, 8)),
        "quiet_bytes": data.draw(st.integers(1, 100)),
    }
    if sizes["num_carriers"] * sizes["hidden_size"] * sizes["num_rows"] <= 8 + num_ranks * sizes["status_bytes"]:
        with pytest.raises(ValueError, match="before any payload"):
            make(num_ranks, dtype, **sizes)
        return
    ranks = make(num_ranks, dtype, **sizes)
    if data.draw(st.booleans()):
        for rank in ranks:
            rank._peeks = False  # as on GPUs
    # Several steps over the same rows: nothing of a step stays for the next.
    for _ in range(4):
        payload, more = data.draw(st.binary(max_size=ranks[0].room)), data.draw(st.booleans())
        statuses = [data.draw(st.binary(min_size=n, max_size=n)) for n in [sizes["status_bytes"]] * num_ranks]
        for i, rank in enumerate(ranks):
            rank.write(statuses[i], payload if i == 0 else b"", more=more and i == 0)
        run_step(ranks)
        assert [rank.read() for rank in ranks] == [(statuses, payload)] * num_ranks
        assert not more or ranks[0].room == ranks[0].capacity


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_is_exact(dtype: torch.dtype) -> None:
    ranks = make(3, dtype, hidden_size=200)
    payload = bytes(range(256)) + bytes(range(255, -1, -1))
    for i, rank in enumerate(ranks):
        rank.write(bytes(6), payload if i == 0 else b"")
    run_step(ranks)
    assert ranks[2].read()[1] == payload


def test_a_sum_that_is_no_frame_is_told() -> None:
    ranks = make(2)
    for rank in ranks:
        rank.write(b"\xff" * 6)
    # Both write as rank 0.
    total = ranks[0].outgoing(0)
    assert total is not None
    total = total * 2
    ranks[1].incoming(0, total)
    with pytest.raises(ControlRowsError, match=r"number 8 of a step's control rows is 510\.0"):
        ranks[1].read()
    ranks[1].write(bytes(6))
    long = torch.zeros(1, 24)
    long[0, :4] = torch.tensor([255.0, 255.0, 255.0, 0.0])
    ranks[1].incoming(0, long)
    with pytest.raises(ControlRowsError, match="a payload of 16777215 bytes came"):
        ranks[1].read()
    long[0, :5] = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0])
    ranks[1].incoming(0, long)
    with pytest.raises(ControlRowsError, match="3 carriers are to be open; 4 or 4 can be"):
        ranks[1].read()


def test_few_carriers_are_open_unless_rank_0_wants_more() -> None:
    ranks = make(2, num_carriers=60, hidden_size=576, status_bytes=38, quiet_bytes=4096)
    assert ranks[0].num_open == 8
    for more, num_open in ((False, 8), (True, 60), (True, 60), (False, 8)):
        for i, rank in enumerate(ranks):
            rank.write(bytes(38), more=more and i == 0)
        run_step(ranks)
        for rank in ranks:
            rank.read()
            assert rank.num_open == num_open


def test_what_does_not_fit_is_refused() -> None:
    leader, follower = make(2)
    with pytest.raises(AssertionError, match="the step carries"):
        leader.write(bytes(6), bytes(leader.room + 1))
    with pytest.raises(AssertionError, match="rank 0 alone"):
        follower.write(bytes(6), b"x")
