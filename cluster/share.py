"""What of the model a rank owns: attention heads, MLP columns, vocabulary rows. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part [begin, end) of `total` things that belongs to one of `num_ranks` ranks.

    Parts follow each other and cover everything; where the number does not divide, the first ranks get one more.
    """

    total: int
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank is {self.rank}; there are {self.num_ranks} ranks")

    @property
    def begin(self) -> int:
        return self.rank * (self.total // self.num_ranks) + min(self.rank, self.total % self.num_ranks)

    @property
    def end(self) -> int:
        return self.begin + self.total // self.num_ranks + (self.rank < self.total % self.num_ranks)

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """A rank's attention heads: query heads [q_begin, q_end), and the KV heads [kv_begin, kv_end) that they read.

    Every query head belongs to one rank. With more ranks than KV heads, ranks that share a KV head each keep a copy of
    it and split its query heads.
    """

    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int

    @classmethod
    def of(cls, *, num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> "HeadShare":
        """
        Raises:
            ValueError: more ranks than query heads of a group can be split among.
        """
        group = num_heads // num_kv_heads
        if num_ranks <= num_kv_heads:
            kv = Share(total=num_kv_heads, rank=rank, num_ranks=num_ranks)
            return cls(q_begin=kv.begin * group, q_end=kv.end * group, kv_begin=kv.begin, kv_end=kv.end)
        if num_ranks > num_heads:
            raise ValueError(f"{num_ranks} ranks cannot share {num_heads} attention heads")
        for head in range(num_kv_heads):
            ranks = Share(total=num_ranks, rank=head, num_ranks=num_kv_heads)
            if ranks.begin <= rank < ranks.end:
                q = Share(total=group, rank=rank - ranks.begin, num_ranks=ranks.size)
                begin = head * group
                return cls(q_begin=begin + q.begin, q_end=begin + q.end, kv_begin=head, kv_end=head + 1)
        raise ValueError(f"rank is {rank}; there are {num_ranks} ranks")

    @property
    def num_heads(self) -> int:
        return self.q_end - self.q_begin

    @property
    def num_kv_heads(self) -> int:
        return self.kv_end - self.kv_begin
