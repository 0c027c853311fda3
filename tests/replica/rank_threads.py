"""Ranks of one replica as threads, stepped together by hand, over real gloo groups and links on loopback."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.control_rows import ControlRows
from chunkserve.cluster.membership import Meeting, Membership, connect, join
from chunkserve.kernels.plan import AttentionPlan
from chunkserve.replica.build import build_engine, build_follower
from chunkserve.replica.engine import Engine, EngineConfig, build_tree
from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.follower import Follower
from chunkserve.replica.grammar import Grammars
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent
from chunkserve.replica.rank_sync import STATUS_BYTES, RankSync
from chunkserve.replica.scheduler import Batch, Scheduler
from chunkserve.replica.step_core import StepCore
from chunkserve.replica.tokenizer import Tokenizer

NUM_SUMS, HIDDEN = 4, 128


class ReducingRunner:
    """A fake model with the all-reduces of a real one."""

    def __init__(self, fake: FakeModelRunner, collectives: Collectives) -> None:
        self.fake, self.collectives = fake, collectives

    def run(self, batch: Batch, plan: AttentionPlan) -> Tensor:
        for _ in range(NUM_SUMS):
            self.collectives.all_reduce(self.collectives.rows(batch.num_tokens).fill_(1.0))
        return self.fake.run(batch, plan)


class Ranks:
    """A leader's engine and its followers.

    Args:
        num_ranks: of the group.
        lead, follow: build the parts; on one thread per rank.
    """

    def __init__(
        self, num_ranks: int, lead: Callable[[Membership], Engine], follow: Callable[[Membership], Follower],
        silence_s: float = 60.0,
    ) -> None:  # fmt: skip
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.followers: dict[int, Follower] = {}
        self.faults: dict[int, BaseException] = {}
        self.lost: dict[int, str] = {}
        # Ranks are processes elsewhere; as threads they would hand the interpreter over every 5 ms only.
        sys.setswitchinterval(0.0002)
        meeting = Meeting(num_ranks, silence_s=silence_s)

        def main(rank: int) -> None:
            try:
                link = connect(
                    meeting.rendezvous, rank, on_lost=lambda _, reason: self.lost.__setitem__(rank, reason)
                )  # fmt: skip
                place = join(meeting.rendezvous, link, host="127.0.0.1", device="cpu")
                self.followers[rank] = follow(place)
                self.followers[rank].run()
            except Exception as fault:  # noqa: BLE001
                self.faults[rank] = fault

        self.threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(1, num_ranks)]
        for thread in self.threads:
            thread.start()
        self.place = meeting.join()
        self.engine = lead(self.place)
        self.engine._emit = self.take

    @property
    def sync(self) -> RankSync:
        assert self.engine._sync is not None
        return self.engine._sync

    def take(self, events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def submit(self, name: str, prompt: tuple[int, ...] | list[int], max_tokens: int, **options: object) -> None:
        request = {key: options.pop(key) for key in ("n", "cache_salt", "prefix_cache") if key in options}
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **options})
        self.engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=params, **request))

    def turn(self) -> bool:
        self.engine._take_messages(wait=False)
        return self.engine.step()

    def run(self, max_steps: int = 5000) -> None:
        """Until there is nothing left to do: an idle turn sends what is pending, a second one finds nothing."""
        idle = 0
        for _ in range(max_steps):
            idle = 0 if self.turn() else idle + 1
            if idle == 2:
                return
        raise AssertionError("the engine does not come to an end")

    def tokens(self, name: str, choice: int = 0) -> tuple[int, ...]:
        return tuple(t for event in self.events[name] if event.choice == choice for t in event.token_ids)

    def close(self) -> None:
        self.sync.leave()
        for thread in self.threads:
            thread.join(30)


def fake_ranks(
    tokenizer: Tokenizer, num_ranks: int, *, pools: dict[int, int] | None = None, hidden: int = HIDDEN, **sizes: object
) -> Ranks:
    """Ranks over FakeModelRunner; `pools` gives some ranks another number of slots."""
    defaults: dict[str, object] = {
        "chunk_size": 16, "num_slots": 64, "chunk_bytes": 1, "max_sequence_tokens": 512, "max_running": 8,
        "max_step_tokens": 64, "max_waiting": 1000,
    }  # fmt: skip
    config = EngineConfig(**{**defaults, **sizes})  # type: ignore[arg-type]

    def parts(place: Membership) -> tuple[EngineConfig, ReducingRunner]:
        own = replace(config, num_slots=(pools or {}).get(place.rank, config.num_slots))
        control = ControlRows(
            rank=place.rank, num_ranks=num_ranks, num_carriers=NUM_SUMS, hidden_size=hidden,
            status_bytes=STATUS_BYTES, quiet_bytes=100,
        )  # fmt: skip
        collectives = Collectives(place.group, max_rows=config.max_step_tokens, hidden_size=hidden, control=control)
        fake = FakeModelRunner(vocab_size=97, num_slots=own.num_slots, chunk_size=config.chunk_size)
        return own, ReducingRunner(fake, collectives)

    def lead(place: Membership) -> Engine:
        own, runner = parts(place)
        tree = build_tree(own, audited=True)
        sync = RankSync(place, runner.collectives, tree, stall_s=10)
        return Engine(runner=runner, tokenizer=tokenizer, config=own, emit=lambda _: None, tree=tree, sync=sync)

    def follow(place: Membership) -> Follower:
        own, runner = parts(place)
        tree = build_tree(own, audited=True)
        sync = RankSync(place, runner.collectives, tree)
        scheduler = Scheduler(tree, max_running=own.max_running, max_step_tokens=own.max_step_tokens)
        core = StepCore(scheduler, runner, plan=own.plan, eos_token_ids=own.eos_token_ids, sync=sync)
        return Follower(core, sync, Grammars(tokenizer))

    return Ranks(num_ranks, lead, follow)


def model_ranks(options: ReplicaOptions, num_ranks: int) -> Ranks:
    """Ranks over a real model."""
    return Ranks(
        num_ranks,
        lambda place: build_engine(options, lambda _: None, place=place),
        lambda place: build_follower(options, place),
    )
