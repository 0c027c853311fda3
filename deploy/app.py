"""The Serve application: HTTP ingress in front, replicas of the model behind it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from chunkserve.cluster.placement import replica_bundles
from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import ChunkDelta, EngineStopped, ReplicaError, ReplicaLoad, Request, TokenEvent
from chunkserve.replica.replica_actor import ReplicaActor
from chunkserve.replica.serve_ports import bind_to_node_address
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.router.route_metrics import RouteMetrics
from chunkserve.router.routing_state import RoutingState
from chunkserve.router.serve_router import ROUTER_CLASS
from chunkserve.router.shared_state import follow_chunks, router_settings, shared_state

from .config import ConfigError, ServeConfig
from .generation import RouteReceipt
from .ingress import build_http_app
from .small_model import NAME as SMALL_MODEL
from .small_model import ensure_small_model

logger = logging.getLogger(__name__)

REPLICA = "replica"
INGRESS = "ingress"

# Streams that a replica takes at once: its own queue is the limit, and refuses what is too much with a reason.
_MAX_ONGOING = 100_000


class ServeReplicaClient:
    """The replicas behind a Serve handle; ReplicaClient of deploy/generation.py.

    Args:
        handle: of the replicas' deployment, whose router is ServeRouter.
        routing: what that router decides by; what is seen of the answers goes back into it.
        scheme: how prompts' chunks are named there.
    """

    def __init__(self, handle: "DeploymentHandle[Any]", routing: RoutingState, scheme: ChunkScheme) -> None:
        self._handle = handle
        self._routing = routing
        self._scheme = scheme
        self._metrics = RouteMetrics(routing.policy)
        self._feed: asyncio.Task[None] | None = None

    async def generate(
        self, request: Request, receipt: RouteReceipt | None = None
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        if self._feed is None or self._feed.done():
            self._feed = asyncio.create_task(
                follow_chunks(
                    self._routing,
                    self._chunk_deltas,
                    on_round=lambda: self._metrics.update(self._routing, time.time()),
                )
            )
        key, prompt = request.request_id, request.prompt_token_ids
        self._routing.open(key, len(prompt), self._scheme.digests(request.cache_salt, prompt))
        try:
            for last_try in (False, True):
                started = False
                try:
                    async with aclosing(self._stream(request)) as stream:
                        async for events in stream:
                            if not started and (cached := _cached_tokens(events)) is not None:
                                started = True
                                self._has_first_token(key, cached, receipt)
                            yield events
                    return
                except ReplicaLost:
                    # Nothing has reached the client yet: another replica may do it.
                    if started or last_try:
                        raise
                    self._routing.failed(key)
                    logger.warning("request_retried request_id=%s", key)
        finally:
            self._routing.close(key)

    async def _stream(self, request: Request) -> AsyncGenerator[Sequence[TokenEvent], None]:
        stream = self._handle.options(stream=True).generate.remote(request)
        finished = False
        try:
            async for events in stream:
                yield events
            finished = True
        except (RayError, RayServeException) as error:
            finished = True
            raise _replica_error(error) from error
        finally:
            if not finished:
                stream.cancel()

    def _has_first_token(self, key: str, cached_tokens: int, receipt: RouteReceipt | None) -> None:
        known = self._routing.first_token(key, cached_tokens)
        if receipt is not None and known is not None:
            receipt.replica, receipt.predicted_cached_tokens = known
            receipt.cached_tokens = cached_tokens

    def _chunk_deltas(self, since: Mapping[str, tuple[int, int]]) -> Sequence[tuple[str, ChunkDelta | None]]:
        return list(self._handle.broadcast("chunk_delta", dict(since)).results(timeout_s=5))

    async def check_health(self) -> None:
        try:
            await self._handle.check_health.remote()
        except (RayError, RayServeException) as error:
            raise _replica_error(error) from error

    async def loads(self) -> Mapping[str, ReplicaLoad]:
        try:
            return dict(await asyncio.to_thread(lambda: self._handle.broadcast("load").results(timeout_s=5)))
        except (RayError, RayServeException, TimeoutError) as error:
            raise _replica_error(error) from error


class ReplicaLost(ReplicaError):
    """The replica died, or cannot be reached."""


def _cached_tokens(events: Sequence[TokenEvent]) -> int | None:
    """Cached tokens of the first choice that has a token."""
    return next((event.cached_tokens for event in events if event.token_ids), None)


def _replica_error(error: Exception) -> ReplicaError:
    """What a replica raised, without Ray's wrapping and its stack trace; or that it is lost."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EngineStopped):
        return ReplicaLost(str(cause))
    if isinstance(cause, ReplicaError):
        return cause
    if cause is not None:
        return ReplicaError(f"{type(cause).__name__}: {cause}")
    return ReplicaLost(f"the replica is lost: {(str(error).strip() or type(error).__name__).splitlines()[0]}")


def build(args: Mapping[str, Any]) -> Application:
    """The application of deploy/config.yaml (`import_path: chunkserve.deploy.app:build`).

    Raises:
        ConfigError: a knob is wrong; names it.
    """
    config = ServeConfig.from_args(args)
    options = replica_options(config)
    scheme = ChunkScheme(model=options.model, dtype=config.dtype, chunk_size=config.chunk_size_tokens)
    settings = router_settings(
        policy=config.routing_policy,
        chunk_size=scheme.chunk_size,
        chunk_identity=scheme.identity,
        max_entries=config.routing_index_entries,
        options=config.routing_options,
    )
    uses_gpus = config.device == "cuda"
    ranks: dict[str, Any] = {}
    if config.tensor_parallel_size > 1:
        ranks["placement_group_bundles"] = replica_bundles(config.tensor_parallel_size, uses_gpus=uses_gpus)
        ranks["placement_group_strategy"] = config.placement_strategy
    replica = serve.deployment(
        name=REPLICA,
        num_replicas=config.num_replicas,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_timeout_s=config.health_stall_s + 5,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1 if uses_gpus else 0},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER_CLASS,
            request_router_kwargs=settings,
            request_routing_stats_period_s=config.routing_report_period_s,
        ),
        **ranks,
    )(ReplicaActor).bind(options, config.health_stall_s, config.log_level, scheme)

    # Serve takes an application builder only as a plain function; it runs in the ingress process.
    def http_app() -> FastAPI:
        logging.getLogger("chunkserve").setLevel(config.log_level.upper())
        bind_to_node_address()
        client = ServeReplicaClient(serve.get_deployment_handle(REPLICA), shared_state(REPLICA, settings), scheme)
        return build_http_app(config, Tokenizer(options.model), client)

    ingress = serve.deployment(
        name=INGRESS,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(http_app)(_Ingress))
    return ingress.bind(replica)


class _Ingress:
    """Binds the replicas to the application; the HTTP app finds their handle by name."""

    def __init__(self, replica: "DeploymentHandle[Any]") -> None:
        self.replica = replica


def replica_options(config: ServeConfig) -> ReplicaOptions:
    """What each replica is built from.

    Raises:
        ConfigError: the model folder is not there.
    """
    if config.model == SMALL_MODEL:
        folder = ensure_small_model(say=logger.info)
    else:
        folder = Path(config.model).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model: expected {SMALL_MODEL} or a folder with config.json, got {config.model!r}")
    return ReplicaOptions(
        model=str(folder),
        dtype=None if config.dtype == "auto" else config.dtype,
        device=None if config.device == "auto" else config.device,
        attention_backend=config.attention_backend,
        num_threads=None if config.num_threads == "auto" else config.num_threads,
        num_ranks=config.tensor_parallel_size,
        chunk_size=config.chunk_size_tokens,
        pool_bytes=None if config.kv_pool_bytes == "auto" else config.kv_pool_bytes,
        pool_chunks=config.kv_pool_chunks,
        max_sequence_tokens=config.max_sequence_tokens,
        max_running=config.max_running_sequences,
        max_step_tokens=None if config.max_step_tokens == "auto" else config.max_step_tokens,
        max_waiting=config.max_waiting_requests,
        prefix_sharing=config.prefix_sharing,
        retain_prefixes=config.retain_prefixes,
    )
