"""The Serve application: HTTP ingress in front, replicas of the model behind it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from chunkserve.cluster.placement import replica_bundles
from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.protocol import StepTime
from chunkserve.replica.replica_actor import ReplicaActor
from chunkserve.replica.serve_ports import bind_to_node_address
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.router.serve_router import ROUTER_CLASS
from chunkserve.router.shared_state import router_settings, shared_state

from .config import ServeConfig
from .ingress import build_http_app
from .replica_client import ServeReplicaClient
from .replica_options import replica_options

REPLICA = "replica"
INGRESS = "ingress"

# Streams that a replica takes at once: its own queue is the limit, and refuses what is too much with a reason.
_MAX_ONGOING = 100_000

# How often a replica that drains looks whether requests are left; Serve's 2 s are waited for by each who has none.
_DRAIN_LOOK_S = 0.25


def build(args: Mapping[str, Any]) -> Application:
    """The application of deploy/config.yaml (`import_path: chunkserve.deploy.app:build`).

    Raises:
        ConfigError: a knob is wrong; names it.
    """
    return application(ServeConfig.from_args(args))


def application(
    config: ServeConfig, *, router_class: type | str = ROUTER_CLASS, simulated_step: StepTime | None = None
) -> Application:
    """The application of a config.

    Args:
        router_class: of the replicas, for load tests that compare routers; a ServeRouter.
        simulated_step: see ReplicaOptions.
    """
    options = replace(replica_options(config), simulated_step=simulated_step)
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
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        health_check_timeout_s=config.health_stall_s + 5,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1 if uses_gpus else 0},
        request_router_config=RequestRouterConfig(
            request_router_class=router_class,
            request_router_kwargs=settings,
            request_routing_stats_period_s=config.routing_report_period_s,
        ),
        # Calls from routers and feeds come twice a second; requests are in the ingress' log.
        logging_config={"enable_access_log": False},
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
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(http_app)(_Ingress))
    return ingress.bind(replica)


class _Ingress:
    """Binds the replicas to the application; the HTTP app finds their handle by name."""

    def __init__(self, replica: "DeploymentHandle[Any]") -> None:
        self.replica = replica
