"""K and V in fp8, and weights in int8, under the real model: nearly the same words at half the memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig

from chunkserve.kernels.dispatch import FP8, AttentionProblem, select_backend
from chunkserve.kernels.plan import build_plan
from chunkserve.replica.build import _why_not_int8, build_engine, check_options, load_config
from chunkserve.replica.kv_store import KVStore, bytes_per_chunk
from chunkserve.replica.model import Decoder
from chunkserve.replica.options import BuildError, ReplicaOptions
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


def test_int8_predicts_a_text_nearly_as_well(small_model: Path) -> None:
    token_ids = Tokenizer(small_model).encode(TEXT.read_text())[:384]
    int8, stored = (
        _mean_nll(Decoder(small_model, weight_dtype=weight_dtype, max_tokens=512), token_ids, None)
        for weight_dtype in (torch.int8, None)
    )
    assert int8 != stored
    assert abs(int8 - stored) < 0.03


def test_int8_where_it_is_not_offered_is_refused(tmp_path: Path) -> None:
    GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(BuildError, match="weight_dtype is int8; this model runs as transformers wrote it"):
        check_options(ReplicaOptions(model=os.fspath(tmp_path), weight_dtype="int8", device="cpu"))
    assert "device is cuda" in str(_why_not_int8(load_config(tmp_path), "cuda"))


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
