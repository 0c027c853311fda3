"""Plans that grow while sequences decode, and are built anew when something else changes."""

import dataclasses

import pytest

from chunkserve.kernels.plan import AttentionPlan, PlanOptions
from chunkserve.replica.chunk_pool import ChunkPool
from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.planner import Planner
from chunkserve.replica.prefix_tree import PrefixTree
from chunkserve.replica.protocol import Request, SamplingParams
from chunkserve.replica.scheduler import Scheduler
from chunkserve.replica.sequence import Sequence

C = 16


class Decoding:
    """Sequences that decode whatever the fake model says; it refuses keys that are not a sequence's own."""

    def __init__(self, prompts: list[list[int]], spare_chunks: int) -> None:
        self.scheduler = Scheduler(PrefixTree(ChunkPool(256), C), max_running=8, max_step_tokens=512)
        self.planner = Planner(C, PlanOptions(spare_chunks=spare_chunks, min_saved_tokens=10_000))
        self.runner = FakeModelRunner(vocab_size=97, num_slots=256, chunk_size=C)
        for i, prompt in enumerate(prompts):
            request = Request(
                request_id=f"r{i}", prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=500)
            )
            self.scheduler.add(*Sequence.begin_all(request, arrival=i, seed=0))

    def step(self) -> AttentionPlan:
        batch = self.scheduler.schedule()
        assert batch is not None
        plan = self.planner.plan(batch)
        logits = self.runner.run(batch, plan)
        sampling = [row.sequence for row in batch.rows if row.samples]
        self.scheduler.commit(batch, dict(zip(sampling, logits.argmax(dim=1).tolist(), strict=True)))
        return plan


@pytest.mark.parametrize("spare_chunks", [0, 1, 4])
def test_decoding_over_chunk_borders_builds_a_plan_only_when_spare_places_are_used_up(spare_chunks: int):
    decoding = Decoding([[1] * 20, [2] * 25, [1] * 16 + [3]], spare_chunks)
    while decoding.scheduler.waiting or decoding.planner.num_built == 0:
        decoding.step()
    built = decoding.planner.num_built
    for _ in range(160):
        decoding.step()
    # Ten borders for each of three sequences, at different steps, and the first steps after the prompts.
    at_most = {0: 32, 1: 20, 4: 8}[spare_chunks]
    assert decoding.planner.num_built - built <= at_most
    assert spare_chunks or decoding.planner.num_built - built >= 28


def test_rows_in_another_order_build_anew():
    decoding = Decoding([[1] * 20, [2] * 25], spare_chunks=4)
    decoding.step()
    decoding.step()
    batch = decoding.scheduler.schedule()
    assert batch is not None
    plan = decoding.planner.plan(dataclasses.replace(batch, rows=batch.rows[::-1], changed=False))
    assert plan.row_pos.tolist() == [row.end - 1 for row in reversed(batch.rows)]
