"""Replicas in one process behind the ingress' own client: all but Ray, HTTP and the model is real.

A stand-in for Serve's handle lets the router's state choose, and runs the actors' own generators.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from ray.exceptions import ActorUnavailableError, RayTaskError

from chunkserve.deploy.replica_client import ServeReplicaClient
from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.engine import Engine, EngineConfig, build_tree
from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.protocol import ChunkDelta, FeedRequest, Request, StepTime
from chunkserve.replica.replica_actor import ReplicaActor
from chunkserve.replica.reporter import RoutingReporter
from chunkserve.replica.token_feed import TokenFeeds
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.router.routing_state import RoutingState

CHUNK = 16
SCHEME = ChunkScheme(model="toy", dtype="float32", chunk_size=CHUNK)
# Of the replica whose code runs; in place of replica_actor._replica_name.
replica_name: ContextVar[str] = ContextVar("replica_name")


class Replica:
    """An actor around a real engine over a model that computes nothing."""

    def __init__(self, name: str, tokenizer: Tokenizer, step: StepTime | None) -> None:
        self.name = name
        config = EngineConfig(
            chunk_size=CHUNK, num_slots=400, chunk_bytes=1, max_sequence_tokens=2048, max_running=8,
            max_step_tokens=128, max_waiting=1000,
        )  # fmt: skip
        self.reporter = RoutingReporter(SCHEME, max_step_tokens=config.max_step_tokens)
        loop = asyncio.get_running_loop()
        self.engine = Engine(
            runner=FakeModelRunner(
                vocab_size=tokenizer.vocab_size, num_slots=config.num_slots, chunk_size=CHUNK, step=step
            ),
            tokenizer=tokenizer,
            config=config,
            emit=lambda events: loop.call_soon_threadsafe(self.actor._feeds.deliver, events),
            reporter=self.reporter,
            tree=build_tree(config, self.reporter),
        )
        self.actor: ReplicaActor = object.__new__(ReplicaActor)
        self.actor._engine = self.engine
        self.actor._feeds = TokenFeeds(self.engine.check_alive)
        self.engine.start()
        self.calls: set[Call] = set()


class Call:
    """A streaming call of Serve: what a generator yields, until it ends, is cancelled, or its replica dies."""

    def __init__(self, replica: Replica, items: AsyncGenerator[Any, None]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._replica = replica
        self._task = asyncio.create_task(self._pump(items))
        replica.calls.add(self)

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()

    def break_off(self) -> None:
        """The replica is gone."""
        self._queue.put_nowait(ActorUnavailableError("killed", b"\0" * 16))
        self._task.cancel()

    async def _pump(self, items: AsyncGenerator[Any, None]) -> None:
        replica_name.set(self._replica.name)
        try:
            async for item in items:
                self._queue.put_nowait(item)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:  # noqa: BLE001 - as Serve wraps whatever it is
            self._queue.put_nowait(RayTaskError("call", "", error))
        finally:
            await items.aclose()
            self._replica.calls.discard(self)


class Cluster:
    """Replicas, the router's state, and the ingress' client over them; a Serve handle to the client."""

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str], step: StepTime | None = None) -> None:
        self._tokenizer, self._step = tokenizer, step
        self.replicas: dict[str, Replica] = {}
        self.state = RoutingState(policy="prefix", chunk_size=CHUNK, chunk_identity=SCHEME.identity, seed=0)
        self.client = ServeReplicaClient(self, self.state, SCHEME)  # type: ignore[arg-type]
        self.sent: list[tuple[str, str]] = []  # request, replica
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.replicas[name] = Replica(name, self._tokenizer, self._step)
        self.state.set_replicas(list(self.replicas), time.time())

    def kill(self, name: str) -> None:
        replica = self.replicas.pop(name)
        self.state.remove_replica(name)
        for call in list(replica.calls):
            call.break_off()
        replica.engine.stop()

    def report(self) -> None:
        """What Serve's controller does twice a second."""
        for replica in self.replicas.values():
            if (report := replica.reporter.report()) is not None:
                self.state.report(replica.name, report)

    async def close(self) -> None:
        if self.client._chunk_feed is not None:
            self.client._chunk_feed.cancel()
        for replica in self.replicas.values():
            for call in list(replica.calls):
                call.cancel()
            await asyncio.to_thread(replica.engine.stop)

    # -- as a handle ---------------------------------------------------------------------------------------------------

    def options(self, *, stream: bool) -> "Cluster":
        return self

    @property
    def run(self) -> "Cluster":
        return self

    feed = run

    def remote(self, request: Request | FeedRequest, *reader: str) -> Call:
        if isinstance(request, FeedRequest):
            if request.replica not in self.replicas:
                raise ActorUnavailableError("killed", b"\0" * 16)
            replica = self.replicas[request.replica]
            return Call(replica, replica.actor.feed(request))
        route = self.state.route_open(request.request_id, request.sampling.max_tokens, time.time())
        replica = self.replicas[route.replicas[0]]
        self.sent.append((request.request_id, replica.name))
        return Call(replica, replica.actor.run(request, *reader))

    def broadcast(self, method: str, since: Mapping[str, tuple[int, int]]) -> "Cluster":
        assert method == "chunk_delta"
        self._since = since
        return self

    def results(self, *, timeout_s: float) -> list[tuple[str, ChunkDelta]]:
        return [
            (name, replica.reporter.journal.delta(self._since.get(name))) for name, replica in self.replicas.items()
        ]
