"""Says when an engine has requests and does not move."""

import logging
import threading
from collections.abc import Callable

from .protocol import ReplicaLoad

logger = logging.getLogger(__name__)


def watch_for_stalls(
    ended: threading.Event, period_s: float, last_turn_s: Callable[[], float | None], load: Callable[[], ReplicaLoad]
) -> None:
    """Log, on a thread of its own, when the loop has not come round for a period, and when it does again.

    Args:
        ended: the loop has; returns then.
        last_turn_s: when it last came round, on any clock; None without requests.
        load: of the engine.
    """
    seen: float | None = None  # the turn that was the last one when we looked before
    stalled = False
    while not ended.wait(period_s):
        turn_s = last_turn_s()
        if turn_s is not None and turn_s == seen and not stalled:
            stalled = True
            now = load()
            logger.warning(
                "engine stalled age_s=%.1f running=%d waiting=%d chunks_in_use=%d steps=%d",
                now.last_step_age_s, now.running_sequences, now.waiting_sequences, now.chunks_in_use, now.steps,
            )  # fmt: skip
        elif stalled and turn_s != seen:
            stalled = False
            logger.warning("engine moves again steps=%d", load().steps)
        seen = turn_s
