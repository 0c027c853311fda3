"""The ranks of one replica as a process group: set-up over a store, the collectives, tear-down. No globals, no Ray.

NCCL where the tensors are on GPUs, gloo for tensors on CPUs and for what ranks say to each other when they are idle.
Nothing listens but on the address given.
"""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]


class RankGroupError(RuntimeError):
    """A collective failed, or the group could not be set up: a rank is gone, stalled, or does something else."""


class RankGroup:
    """One rank's end of the group. All ranks make the same calls in the same order.

    Args:
        rank, num_ranks: of this process.
        store: (address, port) of rank 0's listener.
        listener: of rank 0 alone, from `liveness.open_port`; the group closes it.
        host: this rank's own address, for gloo.
        device: "cpu" or "cuda"; of the tensors of `all_reduce` and `all_gather`.
        join_timeout_s: for the ranks to come together.
        timeout_s: for each call.
    Raises:
        RankGroupError: the ranks did not come together.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        store: tuple[str, int],
        listener: socket.socket | None = None,
        host: str = "127.0.0.1",
        device: str = "cpu",
        join_timeout_s: float = 60.0,
        timeout_s: float = 60.0,
    ) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        join_timeout, timeout = timedelta(seconds=join_timeout_s), timedelta(seconds=timeout_s)
        try:
            # Rank 0's store takes the socket that is bound already: by itself it would listen on all addresses.
            self._store = TCPStore(
                store[0],
                store[1],
                num_ranks,
                listener is not None,
                join_timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener is not None else None,
            )
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = join_timeout
            self._host_group = gloo(PrefixStore("host", self._store), rank, num_ranks, options)
            self._host_group._set_default_timeout(timeout)
            self._group = self._host_group
            if device == "cuda":
                nccl: Any = dist.ProcessGroupNCCL
                options = nccl.Options()
                options._timeout = timeout
                self._group = nccl(PrefixStore("cuda", self._store), rank, num_ranks, options)
        except (RuntimeError, ValueError) as error:
            raise RankGroupError(
                f"rank {rank} of {num_ranks} did not find the others in {join_timeout_s} s: {error}"
            ) from error

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        self._run("all-reduce", tensor, lambda: self._group.allreduce([tensor]))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[R, ...] of each rank, the same shape on all -> [num_ranks, R, ...]."""
        out = tensor.new_empty((self.num_ranks * tensor.shape[0], *tensor.shape[1:]))
        self._run("all-gather", tensor, lambda: self._group._allgather_base(out, tensor.contiguous()))
        return out.view(self.num_ranks, *tensor.shape)

    def broadcast(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on all ranks. Blocks, and does not spin."""
        size = torch.tensor([len(data) if self.rank == 0 else 0])
        self.broadcast_tensor(size)
        if not size:
            return b""
        body = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.broadcast_tensor(body)
        return body.numpy().tobytes()

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Rank 0's values, in place; on the host."""
        self._run("broadcast", tensor, lambda: self._host_group.broadcast([tensor], dist.BroadcastOptions()))

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        out = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._run("all-reduce", out, lambda: self._host_group.allreduce([out], options))
        return int(out)

    def check_exact(self, dtype: torch.dtype, hidden_size: int) -> None:
        """Prove on this very communicator that bytes ride on its sums exactly, beside activations of any size.

        Raises:
            RankGroupError: they do not.
        """
        bytes_ = torch.arange(256, device=self.device).repeat(-(-hidden_size // 256))[:hidden_size].to(dtype)
        owner = torch.arange(hidden_size, device=self.device) % self.num_ranks
        big = torch.finfo(dtype).max / (2 * self.num_ranks)
        for num_rows in (1, 2, 17):
            sent = torch.full((1 + num_rows, hidden_size), big, dtype=dtype, device=self.device)
            sent[0] = torch.where(owner == self.rank, bytes_, torch.zeros_like(bytes_))
            self.all_reduce(sent)
            if not torch.equal(sent[0], bytes_):
                wrong = int((sent[0] != bytes_).nonzero()[0])
                raise RankGroupError(
                    f"the all-reduce in {dtype} is not exact: {bytes_[wrong].item()} came as {sent[0, wrong].item()}"
                )

    def close(self) -> None:
        """Leave the group; calls of other ranks that wait for this one fail."""
        group, self._group = self._group, None
        if self.device == "cuda" and group is not None:
            group.abort()
        # gloo closes its connections with its last reference.
        self._host_group = None

    def _run(self, what: str, tensor: Tensor, start: Callable[[], Any]) -> None:
        where = f"rank {self.rank} of {self.num_ranks}: {what} of {list(tensor.shape)}"
        if self._group is None:
            raise RankGroupError(f"{where} after the group was closed")
        try:
            start().wait()
        except RuntimeError as error:
            raise RankGroupError(f"{where} failed: {str(error).splitlines()[0]}") from error
