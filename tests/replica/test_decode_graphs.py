"""Decode steps from CUDA graphs, as far as a machine without a GPU can run them."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from chunkserve.replica.build import build_engine
from chunkserve.replica.decode_graphs import graph_sizes
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent

from .test_model_families import SHARED, prompts, save

pytest.importorskip("triton")


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(2) == (1, 2)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 24)
    assert graph_sizes(64)[-1] == 64


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_graphs_under_the_interpreter() -> None:
    """Triton decides at its import whether to interpret."""
    done = subprocess.run(
        [Path(sys.executable).with_name("pytest"), Path(__file__).with_name("graph_cases.py"), "-q", "-p", "no:xdist"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_words_with_graphs_are_those_without(tmp_path: Path) -> None:
    folder = save(tmp_path, *SHARED["qwen2"])
    words = {}
    for cuda_graphs in (False, True):
        got: dict[str, list[int]] = defaultdict(list)

        def emit(events: list[tuple[str, TokenEvent]], got: dict[str, list[int]] = got) -> None:
            for request_id, event in events:
                got[request_id] += event.token_ids

        engine = build_engine(
            ReplicaOptions(model=str(folder), device="cuda", dtype="float32", cuda_graphs=cuda_graphs), emit
        )
        for name, prompt in prompts().items():
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=params))
        engine._take_messages(wait=False)
        while engine.step():
            pass
        words[cuda_graphs] = dict(got)
    assert words[True] == words[False]
