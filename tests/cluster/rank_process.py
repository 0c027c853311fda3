"""A rank as a process of its own: joins the group, says so on stdout, then waits in a collective, or idles."""

import json
import os
import sys
import threading

import torch

from chunkserve.cluster.liveness import Process
from chunkserve.cluster.membership import Rendezvous, connect, join


def main() -> None:
    options = json.loads(sys.argv[1])
    place = Rendezvous(
        **{
            **options["place"],
            "token": bytes.fromhex(options["place"]["token"]),
            "leader": Process(
                pid=options["place"]["leader"]["pid"], machine=bytes.fromhex(options["place"]["leader"]["machine"])
            ),
        }
    )
    link = connect(place, options["rank"], on_lost=lambda rank, reason: os._exit(3))
    membership = join(place, link, host="127.0.0.1", device="cpu")
    print("joined", flush=True)
    if options["busy"]:
        while True:
            membership.group.all_reduce(torch.ones(10))
    threading.Event().wait()


if __name__ == "__main__":
    main()
