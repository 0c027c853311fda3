"""Rank 0 as a process of its own, with the other ranks as its children: a replica as Serve runs it, without Serve.

Lines of JSON: a request per line of stdin; what happens on stdout. Logs of all ranks go to stderr.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from typing import Any


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    # Imported here: the children import this file too, and run_rank begins without torch.
    from chunkserve.cluster.membership import Meeting
    from chunkserve.replica.build import build_engine
    from chunkserve.replica.options import ReplicaOptions
    from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent
    from chunkserve.replica.rank_main import run_rank

    options = ReplicaOptions(**json.loads(sys.argv[1]))
    meeting = Meeting(options.num_ranks)
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=run_rank, args=("127.0.0.1", rank, meeting.rendezvous, options, "info"))
        for rank in range(1, options.num_ranks)
    ]
    for process in ranks:
        process.start()
    say(pids=[process.pid for process in ranks])

    def lost(rank: int, reason: str) -> None:
        say(lost=rank, reason=reason)
        time.sleep(1.0)
        os._exit(1)

    place = meeting.join(on_lost=lost)

    def emit(events: list[tuple[str, TokenEvent]]) -> None:
        for name, event in events:
            say(name=name, token_ids=event.token_ids, finish_reason=event.finish_reason, error=event.error)

    engine = build_engine(options, emit, place=place)
    engine.start()
    say(ready=True)

    def end() -> None:
        engine.join()
        say(stopped=str(engine._fault))
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
    for line in sys.stdin:
        wish = json.loads(line)
        sampling = SamplingParams(max_tokens=wish["max_tokens"], temperature=0.0, ignore_eos=True)
        engine.submit(
            Request(request_id=wish["name"], prompt_token_ids=tuple(wish["prompt"]), sampling=sampling)
        )  # fmt: skip
    os._exit(0)  # whoever started this is gone


if __name__ == "__main__":
    main()
