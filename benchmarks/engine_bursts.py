"""Bursts of requests with one beginning on an engine alone: no HTTP, no Ray, stepped by hand."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from chunkserve.replica.build import build_engine
from chunkserve.replica.engine import Engine
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams


def random_prompt(size: int, words: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(1000, 40000, (size,), generator=words).tolist())


@dataclass(frozen=True, kw_only=True)
class Burst:
    """What came of one: the steps in which all of it decoded, how long they took, and each request's tokens."""

    steps: int
    seconds: float
    tokens: list[tuple[int, ...]]

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.steps


class BurstEngine:
    """An engine, and what its requests got.

    Args:
        options: of the replica.
        new_tokens: of each request.
    """

    def __init__(self, options: ReplicaOptions, new_tokens: int) -> None:
        self.engine: Engine = build_engine(options, self._take)
        self._new_tokens = new_tokens
        self._tokens: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._num_bursts = 0

    def decode(self, prompts: list[tuple[int, ...]], watch: AbstractContextManager[Any] | None = None) -> Burst:
        """All prompts at once, to their ends.

        Args:
            watch: around the steps in which all of them decode.
        Raises:
            RuntimeError: a request did not come to its end.
        """
        engine, batch = self.engine, len(prompts)
        self._num_bursts += 1
        names = [f"{self._num_bursts}-{i}" for i in range(batch)]
        params = SamplingParams(max_tokens=self._new_tokens, temperature=0.0, ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True):
            self._tokens[name] = []
            engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=params))
        while len(engine._scheduler.running) < batch or any(not s.num_generated for s in engine._scheduler.running):
            engine._take_messages(wait=False)
            engine.step()
        with watch or nullcontext():
            steps, begin_s = 0, time.perf_counter()
            while len(engine._scheduler.running) == batch:
                engine.step()
                steps += 1
            seconds = time.perf_counter() - begin_s
        while engine.step():
            pass
        if missing := set(names) - self._ended:
            raise RuntimeError(f"{len(missing)} of {batch} requests have not ended")
        return Burst(steps=steps, seconds=seconds, tokens=[tuple(self._tokens.pop(name)) for name in names])

    def _take(self, events: list[tuple[str, Any]]) -> None:
        for name, event in events:
            self._tokens[name].extend(event.token_ids)
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
                self._ended.add(name)
