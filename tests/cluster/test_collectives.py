"""Sums, gathered columns and control rows over gloo."""

import socket

import psutil
import pytest
import torch

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.control_rows import ControlRows
from chunkserve.cluster.liveness import open_port
from chunkserve.cluster.rank_group import RankGroup, RankGroupError

from .rank_threads import on_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_control_rows_share_a_sum(num_ranks: int, dtype: torch.dtype) -> None:
    payload = bytes(range(256))

    def run(group: RankGroup) -> tuple[list[torch.Tensor], object, int]:
        control = ControlRows(
            rank=group.rank, num_ranks=num_ranks, num_carriers=4, hidden_size=96, status_bytes=5, dtype=dtype
        )
        collectives = Collectives(group, max_rows=7, hidden_size=96, dtype=dtype, control=control)
        sums = []
        for step in range(3):
            control.write(bytes([group.rank, step, 1, 2, 255]), payload if group.rank == 0 else b"")
            collectives.begin_step()
            for carrier in range(4):
                partial = collectives.rows(1 + step + carrier)
                partial.fill_(group.rank + carrier)
                sums.append(collectives.all_reduce(partial).clone())
        return sums, control.read(), collectives.num_all_reduces

    for sums, heard, count in on_ranks(num_ranks, run):
        assert count == 12
        assert heard == ([bytes([rank, 2, 1, 2, 255]) for rank in range(num_ranks)], payload)
        for i, total in enumerate(sums):
            step, carrier = divmod(i, 4)
            want = sum(rank + carrier for rank in range(num_ranks))
            assert total.shape == (1 + step + carrier, 96)
            assert (total == want).all()


def test_columns_of_uneven_width_are_gathered_in_order() -> None:
    widths = [4, 4, 3]
    whole = torch.randn(5, 11)

    def run(group: RankGroup) -> torch.Tensor:
        begin = sum(widths[: group.rank])
        collectives = Collectives(group, max_rows=1, hidden_size=8)
        return collectives.gather_columns(whole[:, begin : begin + widths[group.rank]], widths)

    assert all(torch.equal(out, whole) for out in on_ranks(3, run))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_self_test_passes_on_gloo(num_ranks: int) -> None:
    def run(group: RankGroup) -> None:
        for dtype in DTYPES:
            group.check_exact(dtype, 576)

    on_ranks(num_ranks, run)


def test_self_test_finds_a_sum_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RankGroup.all_reduce

    def lossy(self: RankGroup, tensor: torch.Tensor) -> None:
        whole(self, tensor)
        tensor.copy_(tensor.to(torch.float8_e4m3fn).to(tensor.dtype))

    monkeypatch.setattr(RankGroup, "all_reduce", lossy)
    with pytest.raises(RankGroupError, match="is not exact: 17"):
        on_ranks(2, lambda group: group.check_exact(torch.float32, 300))


def test_bytes_and_smallest_reach_all() -> None:
    def run(group: RankGroup) -> tuple[bytes, bytes, int]:
        sent = bytes(range(256)) * 1000
        is_leader = group.rank == 0
        return group.broadcast(sent if is_leader else b""), group.broadcast(b""), group.smallest(7 - group.rank)

    assert on_ranks(3, run) == [(bytes(range(256)) * 1000, b"", 5)] * 3


def test_a_rank_that_leaves_is_an_error_not_a_hang() -> None:
    def leave(group: RankGroup) -> None:
        if group.rank == 0:
            group.all_reduce(torch.zeros(4))

    with pytest.raises(RankGroupError, match=r"rank 0 of 2: all-reduce of \[4\] failed"):
        on_ranks(2, leave, timeout_s=5)


def test_nothing_listens_beyond_loopback() -> None:
    def run(group: RankGroup) -> set[str]:
        group.smallest(1)
        connections = psutil.Process().net_connections("tcp")
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}

    for addresses in on_ranks(2, run):
        assert addresses == {"127.0.0.1"}


def test_a_rank_that_never_comes_is_told() -> None:
    listener = open_port("127.0.0.1")
    assert listener.family == socket.AF_INET
    with pytest.raises(RankGroupError, match="rank 0 of 2 did not find the others in 1 s"):
        RankGroup(
            rank=0, num_ranks=2, store=("127.0.0.1", listener.getsockname()[1]), listener=listener, join_timeout_s=1
        )  # fmt: skip
