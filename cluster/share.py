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
