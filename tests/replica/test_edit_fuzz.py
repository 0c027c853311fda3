"""10,000 random edits over real all-reduces: encoded, carried, decoded, applied, and every rank's tree is the same."""

import random

import pytest

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.control_rows import ControlRows
from chunkserve.cluster.rank_group import RankGroup
from chunkserve.replica.chunk_pool import ChunkPool
from chunkserve.replica.prefix_tree import PrefixTree
from chunkserve.replica.protocol import Request, SamplingParams
from chunkserve.replica.scheduler import Scheduler
from chunkserve.replica.sequence import Sequence
from chunkserve.replica.tree_digest import DIGEST_BYTES, DigestChain
from chunkserve.replica.tree_edit import Clear, EditReader, Join, Leave, TreeEdit, encode

from ..cluster.rank_threads import on_ranks  # noqa: TID252

pytestmark = pytest.mark.slow

NUM_EDITS, PER_STEP, CARRIERS, HIDDEN = 10_000, 25, 4, 512
STEMS = [[i * 7 % 5 for i in range(size)] for size in (0, 7, 16, 40)]


def random_edit(rng: random.Random, arrival: int) -> TreeEdit:
    kind = rng.random()
    if kind < 0.6:
        prompt = (*rng.choice(STEMS), *(rng.randrange(3) for _ in range(rng.randrange(1, 20))))
        request = Request(
            request_id=f"arrival {arrival}", prompt_token_ids=prompt, n=rng.choice([1, 1, 2]),
            sampling=SamplingParams(max_tokens=rng.randrange(1, 20)), cache_salt=rng.choice(["", "a"]),
        )  # fmt: skip
        return Join(arrival=arrival, request=request, seed=arrival)
    return Leave(arrival=rng.randrange(max(1, arrival - 40), arrival + 1)) if kind < 0.99 else Clear()


class Replica:
    """Tree and scheduler of a rank; a model that computes nothing, and says a function of position."""

    def __init__(self) -> None:
        self.tree = PrefixTree(ChunkPool(48), 16, audit=DigestChain())
        self.scheduler = Scheduler(self.tree, max_running=12, max_step_tokens=96)
        self.sequences: dict[int, Sequence] = {}

    def apply(self, edit: TreeEdit) -> None:
        match edit:
            case Join():
                for sequence in Sequence.begin_all(edit.request, arrival=edit.arrival, seed=edit.seed):
                    self.sequences[sequence.arrival] = sequence
                    self.scheduler.add(sequence)
            case Leave() if edit.arrival in self.sequences:
                self.scheduler.remove(self.sequences.pop(edit.arrival))
            case Clear():
                self.tree.clear()

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            return
        sampled = {row.sequence: (row.sequence.arrival + row.end) % 3 for row in batch.rows if row.samples}
        self.scheduler.commit(batch, sampled)
        for sequence in sampled:
            if sequence.num_generated >= sequence.request.sampling.max_tokens:
                self.scheduler.remove(self.sequences.pop(sequence.arrival))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_trees_are_equal_after_every_step(num_ranks: int) -> None:
    def run(group: RankGroup) -> tuple[int, int, int]:
        control = ControlRows(
            rank=group.rank, num_ranks=num_ranks, num_carriers=CARRIERS, hidden_size=HIDDEN, status_bytes=DIGEST_BYTES
        )
        collectives = Collectives(group, max_rows=1, hidden_size=HIDDEN, control=control)
        replica, reader, rng, outbox = Replica(), EditReader(), random.Random(1), bytearray()
        sent = applied = arrival = 0
        while applied < NUM_EDITS:
            if group.rank == 0 and sent < NUM_EDITS and len(outbox) < 2 * control.capacity:
                for _ in range(PER_STEP):
                    edit = random_edit(rng, arrival + 1)
                    arrival += edit.request.n if isinstance(edit, Join) else 0
                    outbox += encode(edit)
                    sent += 1
            replica.tree.audit_slots()
            assert replica.tree.audit is not None
            payload = bytes(outbox[: control.room])
            del outbox[: len(payload)]
            control.write(replica.tree.audit.digest(), payload, more=bool(outbox) and group.rank == 0)
            collectives.begin_step()
            for _ in range(CARRIERS):
                collectives.all_reduce(collectives.rows(1).fill_(group.rank))
            digests, payload = control.read()
            assert len(set(digests)) == 1, f"trees differ after {applied} edits"
            for edit in reader.feed(payload):
                replica.apply(edit)
                applied += 1
            replica.step()
        replica.tree.check()
        return applied, replica.tree.num_evictions, replica.scheduler.num_preemptions

    results = on_ranks(num_ranks, run)
    assert len(set(results)) == 1
    applied, evictions, _ = results[0]
    assert applied == NUM_EDITS
    assert evictions > 100
