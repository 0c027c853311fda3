"""A rank as a process of its own: joins the group, says so on stdout, then waits in a collective, or idles."""

import json
import os
import sys
import threading

import torch

from chunkserve.cluster.membership import Rendezvous, join


def main() -> None:
    options = json.loads(sys.argv[1])
    place = Rendezvous(**{**options["place"], "token": bytes.fromhex(options["place"]["token"])})
    membership = join(
        place, options["rank"], on_lost=lambda rank, reason: os._exit(3), host="127.0.0.1", device="cpu"
    )  # fmt: skip
    print("joined", flush=True)
    if options["busy"]:
        while True:
            membership.group.all_reduce(torch.ones(10))
    threading.Event().wait()


if __name__ == "__main__":
    main()
