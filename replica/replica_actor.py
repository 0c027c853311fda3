"""The Serve deployment around one engine: requests come in as records, events go out as they are made.

Serve imports this wherever the application is put together; torch is imported where a replica runs.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from chunkserve.cluster.membership import Meeting, Membership, end_start
from chunkserve.cluster.rank_actor import Ranks

from .chunk_hash import ChunkScheme
from .options import ReplicaOptions
from .protocol import ChunkDelta, FeedRequest, ReplicaError, ReplicaLoad, ReplicaOverloaded, Request, TokenEvent
from .serve_ports import bind_to_node_address
from .token_feed import Message, TokenFeeds

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

# What a replica that has failed gets to send its last events, before its process ends.
_LAST_WORDS_S = 2.0


class ReplicaActor:
    """One copy of the model. Serve makes as many as `num_replicas` says.

    With several ranks this process is rank 0, and its placement group has a bundle for each of them.

    Args:
        options: the model and its sizes.
        health_stall_s: the engine's loop must come round within this time, in seconds.
        chunk_scheme: how routers name chunks; None tells them nothing.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        health_stall_s: float,
        log_level: str = "info",
        chunk_scheme: ChunkScheme | None = None,
    ) -> None:
        from .build import build_engine

        logging.getLogger("chunkserve").setLevel(log_level.upper())
        bind_to_node_address()
        self._health_stall_s = health_stall_s
        self._loop = asyncio.get_event_loop()
        place = self._gather(options, log_level) if options.num_ranks > 1 else None
        try:
            self._engine: Engine = build_engine(options, self._emit, chunk_scheme, place)
        except BaseException as fault:
            if place is not None:
                end_start(place.link, fault)
            raise
        # A thread of its own: a grammar may take seconds, and health checks must not wait behind it.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._num_preparing, self._max_preparing = 0, options.max_waiting + options.max_running
        self._feeds = TokenFeeds(self._engine.check_alive)
        self._engine.start()
        if place is not None:
            threading.Thread(target=self._end_with_engine, name="rank-end", daemon=True).start()

    async def run(self, request: Request, reader: str) -> AsyncGenerator[str, None]:
        """Serve a request: one item, this replica's name, once it is accepted; the end, once each choice has its
        finish_reason. Its events go into the reader's `feed`. Ending the generator early cancels the request.

        Raises:
            RequestRefused, ReplicaOverloaded: in place of the item.
            EngineStopped: the engine has failed before the first token, so that another replica may do it.
        """
        done = self._feeds.open(request.request_id, request.n, reader)
        try:
            if request.sampling.grammar is not None:
                await self._prepare(request)
            self._engine.submit(request)
            yield _replica_name()
            await done
        finally:
            if self._feeds.close(request.request_id):
                self._engine.cancel(request.request_id)

    async def feed(self, request: FeedRequest) -> AsyncGenerator[Message, None]:
        """A message per step with the events of all requests of a reader; ends when there are none.

        Raises:
            ReplicaError: another replica is meant.
        """
        if request.replica != _replica_name():
            raise ReplicaError(f"a feed of replica {request.replica} was asked of {_replica_name()}")
        async with aclosing(self._feeds.read(request.reader)) as messages:
            async for message in messages:
                yield message

    async def load(self) -> tuple[str, ReplicaLoad]:
        """This replica's name, and what it is doing."""
        return _replica_name(), self._engine.load()

    async def reset_cache(self) -> str:
        """Forget the chunks that nobody uses; this replica's name, once that is on its way.

        Raises:
            EngineStopped, TimeoutError: as `check_health`.
        """
        self._engine.clear_prefixes()
        await asyncio.to_thread(self._engine.ping, self._health_stall_s)
        return _replica_name()

    def record_routing_stats(self) -> dict[str, Any]:
        """A RoutingReport as a dict; Serve asks for it and passes it on to all routers."""
        report = self._engine.reporter.report() if self._engine.reporter is not None else None
        return asdict(report) if report is not None else {}

    async def chunk_delta(self, since: Mapping[str, tuple[int, int]]) -> tuple[str, ChunkDelta | None]:
        """This replica's name, and how its chunks changed since the (epoch, sequence) given under it."""
        name = _replica_name()
        reporter = self._engine.reporter
        return name, reporter.journal.delta(since.get(name)) if reporter is not None else None

    async def check_health(self) -> None:
        """Serve asks this too, and replaces the replica when it raises.

        Raises:
            EngineStopped: the engine has failed.
            TimeoutError: its loop does not come round.
        """
        await asyncio.to_thread(self._engine.ping, self._health_stall_s)

    async def _prepare(self, request: Request) -> None:
        """Compile a request's grammar when its turn has come.

        Raises:
            RequestRefused: it can never be followed here.
            ReplicaOverloaded: too many wait for theirs.
        """
        if self._num_preparing >= self._max_preparing:
            raise ReplicaOverloaded(
                f"{self._num_preparing} requests wait for their grammars to be compiled, as many as may "
                "(max_waiting_requests + max_running_sequences)"
            )
        self._num_preparing += 1
        try:
            await self._loop.run_in_executor(self._compiler, self._engine.prepare, request)
        finally:
            self._num_preparing -= 1

    def _gather(self, options: ReplicaOptions, log_level: str) -> Membership:
        """Start the other ranks, and wait for them.

        Raises:
            LinkError, RankGroupError: not all came; none is left.
        """
        from .build import device_of
        from .rank_main import run_rank

        device = device_of(options)
        meeting = Meeting(options.num_ranks, host=ray.util.get_node_ip_address())
        ranks = self._ranks = Ranks(
            options.num_ranks, run_rank, meeting.rendezvous, options, log_level, uses_gpus=device == "cuda"
        )  # fmt: skip

        def lost(rank: int, reason: str) -> None:
            # The engine notices by itself, unless it waits for one that it cannot reach; its process ends either way.
            logger.error("rank lost rank=%d reason=%s", rank, reason)
            time.sleep(_LAST_WORDS_S)
            os._exit(1)

        try:
            return meeting.join(device=device, on_lost=lost, trouble=ranks.trouble)
        except BaseException:
            ranks.kill()
            raise

    def _end_with_engine(self) -> None:
        """A replica whose ranks are gone goes too, at once: Serve would ask it for its health a few times first."""
        if self._engine.join():
            time.sleep(_LAST_WORDS_S)
            os._exit(1)

    def _emit(self, events: list[tuple[str, TokenEvent]]) -> None:
        # One wake-up of the event loop per step, whatever the number of streams.
        self._loop.call_soon_threadsafe(self._feeds.deliver, events)


def _replica_name() -> str:
    return serve.get_replica_context().replica_id.unique_id
