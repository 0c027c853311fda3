"""Bytes that ride on all-reduces which run anyway, as rows of numbers from 0 to 255. No Ray.

A step has a fixed number of all-reduces, its *carriers*. The first of them, as many as are *open*, take `num_rows` more
rows of `hidden_size` numbers each. All their numbers together are the step's *frame*, one byte a number:

    length of the payload (4) | carriers open in the next step (4) | status of rank 0 | ... | payload of rank 0 | zeros

Few carriers are open while rank 0 has little to say, for a row takes its time in each of them; all are in the step
after one that could not hold everything. Each rank knows it a step before: buffers of different sizes cannot be summed.

Each rank writes its own part and zeros elsewhere, so that a sum over ranks is the frame. Numbers up to 255 are exact in
float32, float16 and bfloat16, and so is their sum with zeros.
"""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_HEAD = struct.Struct("<II")


class ControlRowsError(Exception):
    """What came back from the all-reduces is no frame: another rank wrote where it must not, or a sum is not exact."""


class ControlRows:
    """The frame of one step: `write`, then per carrier `outgoing` and `incoming`, then `read`.

    Args:
        rank, num_ranks: who writes which status; rank 0 writes the payload.
        num_carriers: all-reduces of a step.
        hidden_size: numbers of a row.
        num_rows: rows per carrier.
        status_bytes: length of each rank's status.
        quiet_bytes: of payload that the few carriers hold: a join or two of prompts of usual length.
        dtype, device: of the activations.
    Raises:
        ValueError: the frame has no room for the statuses and a byte of payload.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        num_carriers: int,
        hidden_size: int,
        num_rows: int = 1,
        status_bytes: int,
        quiet_bytes: int = 4096,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._head = _HEAD.size + num_ranks * status_bytes
        self._carrier_bytes = num_rows * hidden_size
        self._num_carriers = num_carriers
        self._num_few = min(num_carriers, -(-(self._head + quiet_bytes) // self._carrier_bytes))
        self.num_open = self._num_few
        self.capacity = num_carriers * self._carrier_bytes - self._head
        if self.capacity < 1:
            raise ValueError(
                f"{num_carriers} all-reduces with {num_rows} row(s) of {hidden_size} numbers hold "
                f"{num_carriers * self._carrier_bytes} bytes; {num_ranks} ranks take {self._head} before any payload"
            )
        self.num_rows = num_rows
        self._rank, self._num_ranks, self._status_bytes = rank, num_ranks, status_bytes
        self._out = torch.zeros((num_carriers, num_rows, hidden_size), dtype=dtype, device=device)
        self._sum = torch.zeros_like(self._out)
        # Views are kept: making one takes as long as a small copy.
        self._out_rows, self._sum_rows = self._out.unbind(), self._sum.unbind()
        # torch takes microseconds for what numpy does in one, and numpy has no bfloat16.
        by_numpy = device == "cpu" and dtype == torch.float32
        self._out_numbers = self._out.view(-1).numpy() if by_numpy else None
        self._sum_flat = self._sum.view(-1)
        self._sum_numbers = self._sum_flat.numpy() if by_numpy else None
        self._outgoing_bytes = 0
        # Looking at a sum before the step is done is free on CPUs alone; there it says which carriers bear nothing.
        self._peeks = device == "cpu"
        self._incoming_bytes = self._sum.numel()

    @property
    def room(self) -> int:
        """Bytes of payload that the next step carries."""
        return self.num_open * self._carrier_bytes - self._head

    def write(self, status: bytes, payload: bytes = b"", *, more: bool = False) -> None:
        """What this rank has to say in the next step.

        Args:
            status: [status_bytes].
            payload: at most `room` bytes; of rank 0 alone.
            more: rank 0 has more to say, and wants all carriers in the step after.
        """
        assert len(status) == self._status_bytes, f"status has {len(status)} bytes, not {self._status_bytes}"
        assert len(payload) <= self.room, f"payload has {len(payload)} bytes; the step carries {self.room}"
        assert self._rank == 0 or not (payload or more), "rank 0 alone has a payload"
        frame = bytearray(self._head + len(payload))
        at = _HEAD.size + self._rank * self._status_bytes
        frame[at : at + self._status_bytes] = status
        if self._rank == 0:
            _HEAD.pack_into(frame, 0, len(payload), self._num_carriers if more else self._num_few)
            frame[self._head :] = payload
        if self._out_numbers is not None:
            self._out_numbers[: len(frame)] = np.frombuffer(frame, np.uint8)
            self._out_numbers[len(frame) : self._outgoing_bytes] = 0
        else:
            flat = self._out.view(-1)
            flat[: len(frame)] = torch.frombuffer(frame, dtype=torch.uint8).to(flat.device, flat.dtype)
            flat[len(frame) : self._outgoing_bytes].zero_()
        self._outgoing_bytes = len(frame)
        self._incoming_bytes = self.num_open * self._carrier_bytes

    def outgoing(self, carrier: int) -> Tensor | None:
        """[num_rows, hidden_size] to send with an open carrier; None stands for zeros."""
        return self._out_rows[carrier] if carrier * self._carrier_bytes < self._outgoing_bytes else None

    def incoming(self, carrier: int, rows: Tensor) -> bool:
        """Take an open carrier's sum [num_rows, hidden_size], in order. Whether it may be other than zero."""
        if carrier * self._carrier_bytes >= self._incoming_bytes:
            return False
        self._sum_rows[carrier].copy_(rows)
        if self._peeks and (carrier + 1) * self._carrier_bytes >= _HEAD.size > carrier * self._carrier_bytes:
            self._incoming_bytes = self._head + self._peeked_length()
        return True

    def read(self) -> tuple[Sequence[bytes], bytes]:
        """Status of each rank, and the payload, once all carriers are through.

        Raises:
            ControlRowsError: the sums are no frame.
        """
        frame = self._bytes(self._incoming_bytes)
        length, num_open = _HEAD.unpack_from(frame)
        if length > self.room:
            raise ControlRowsError(f"a payload of {length} bytes came; the step carries {self.room}")
        if num_open not in (self._num_few, self._num_carriers):
            raise ControlRowsError(
                f"{num_open} carriers are to be open; {self._num_few} or {self._num_carriers} can be"
            )  # fmt: skip
        self.num_open = num_open
        statuses = [
            frame[at : at + self._status_bytes]
            for at in range(_HEAD.size, self._head, self._status_bytes)
        ]  # fmt: skip
        return statuses, frame[self._head : self._head + length]

    def _peeked_length(self) -> int:
        """Of the payload; what is no length shows in `read`."""
        length = sum(number * 256**i for i, number in enumerate(self._sum_flat[:4].tolist()))
        return int(length) if 0 <= length <= self.room else self.room

    def _bytes(self, count: int) -> bytes:
        """The first numbers of the sum."""
        if self._sum_numbers is not None:
            numbers = self._sum_numbers[:count]
        else:
            numbers = self._sum_flat[:count].float().cpu().numpy()
        with np.errstate(invalid="ignore"):  # what is no byte shows below
            values = numbers.astype(np.uint8)
        if not (values == numbers).all():
            at = int(np.flatnonzero(values != numbers)[0])
            raise ControlRowsError(f"number {at} of a step's control rows is {numbers[at]}, not 0 to 255")
        return values.tobytes()
