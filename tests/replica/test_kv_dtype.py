"""K and V in fp8 under the real model: nearly the same words at half the memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from chunkserve.kernels.dispatch import FP8, AttentionProblem, select_backend
from chunkserve.kernels.plan import build_plan
from chunkserve.replica.build import build_engine
from chunkserve.replica.kv_store import KVStore, bytes_per_chunk
from chunkserve.replica.model import Decoder
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXT = Path(__file__).parents[2] / "README.md"


def _mean_nll(model: Decoder, token_ids: list[int], kv_dtype: torch.dtype | None) -> float:
    """Of each token after those before it; in two steps, so that keys of a chunk come from both."""
    problems = model.config.problems(device="cpu", dtype=torch.bfloat16, chunk_size=64, kv_dtype=kv_dtype)
    path = np.arange(-(-len(token_ids) // 64), dtype=np.int32)
    kv = KVStore(select_backend(problems[0]), problems, num_slots=len(path))
    logits = []
    middle = len(token_ids) // 2 + 5
    for begin, end in ((0, middle), (middle, len(token_ids))):
        plan = build_plan(paths=[path], kv_lens=[end], q_lens=[end - begin], kv_present=[begin], chunk_size=64)
        rows = torch.arange(begin, end)
        with torch.inference_mode():
            logits.append(model.forward(torch.tensor(token_ids[begin:end]), rows, plan, kv, torch.arange(end - begin)))
    return torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], torch.tensor(token_ids[1:])).item()


def test_fp8_predicts_a_text_nearly_as_well(small_model: Path) -> None:
    token_ids = Tokenizer(small_model).encode(TEXT.read_text())[:384]
    model = Decoder(small_model, max_tokens=512)
    fp8, stored = _mean_nll(model, token_ids, FP8), _mean_nll(model, token_ids, None)
    assert fp8 != stored
    assert abs(fp8 - stored) < 0.03


def test_the_knob_halves_a_chunk(small_model: Path) -> None:
    sizes = {}
    for kv_dtype in (None, "fp8_e4m3"):
        options = ReplicaOptions(
            model=os.fspath(small_model), kv_dtype=kv_dtype, pool_chunks=8, max_sequence_tokens=256
        )
        engine = build_engine(options, lambda events: None)
        sizes[kv_dtype] = engine.load().chunk_bytes
    # 30 layers, 3 KV heads: a scale each for K and V.
    assert sizes["fp8_e4m3"] == sizes[None] // 2 + 30 * 2 * 3 * 4


def test_bytes_are_those_of_the_tensors() -> None:
    config = {"device": "cpu", "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "chunk_size": 64}
    for kv_dtype in (torch.float32, torch.bfloat16, FP8):
        problem = AttentionProblem(dtype=torch.float32, kv_dtype=kv_dtype, **config)
        kv = select_backend(problem).allocate(problem, 5)
        tensors = [x for x in (kv.k, kv.v, kv.k_scale, kv.v_scale) if x is not None]
        assert sum(x.nbytes for x in tensors) == 5 * bytes_per_chunk([problem])
