"""Keeps Ray Serve's own sockets off public addresses.

Serve 2.60 opens a gRPC port in every replica process, on all interfaces, for calls between deployments that we do not
use, and whoever reaches it can make it unpickle. There is no option for the address (ray/serve/_private/replica.py).
"""

import logging

import ray
from ray.serve._private import replica as serve_replica

logger = logging.getLogger(__name__)


def bind_to_node_address() -> None:
    """Make this process's Serve port listen on the node's address alone; to be called while a deployment is made."""
    add_port = getattr(serve_replica, "add_port_to_grpc_server", None)
    if add_port is None:
        logger.warning("serve_port unguarded: this Ray version opens its port in another way")
        return
    node = ray.util.get_node_ip_address()

    def add_guarded_port(server: object, address: str) -> int:
        return int(add_port(server, address.replace("[::]", node)))

    serve_replica.add_port_to_grpc_server = add_guarded_port
