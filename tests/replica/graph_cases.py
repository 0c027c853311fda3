"""Decode steps from graphs, on Triton's interpreter: test_decode_graphs.py runs this in a process of its own.

Without a GPU nothing is captured. `Relaunched` stands for a graph: a replay launches again what the capture launched,
on the same memory and without bringing a plan to the device, as kernels in a graph would. What a graph must get right
is then real: memory that stays, plans staged from outside, rows that nobody reads.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chunkserve.kernels import triton_plan, triton_tpp
from chunkserve.kernels.dispatch import get_backend
from chunkserve.kernels.plan import PlanOptions, build_plan
from chunkserve.replica.decode_graphs import DecodeGraphs, Graph, graph_sizes
from chunkserve.replica.engine import Engine, EngineConfig
from chunkserve.replica.kv_store import KVStore
from chunkserve.replica.model import Decoder
from chunkserve.replica.model_runner import ModelRunner
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent
from chunkserve.replica.tokenizer import Tokenizer

from .test_model_families import SHARED, prompts, save

SLOTS, CHUNK, NEW_TOKENS = 40, 16, 5
# Two layers with masks of their own: the plan is staged for each.
KIND, OPTIONS = SHARED["qwen2"]
TWO_LAYERS = {**OPTIONS, "num_hidden_layers": 2, "max_window_layers": 1}
PROMPTS = ("stem", "stem and a tail", "begin of the stem")


def as_in_a_graph(run: Callable[[], Tensor]) -> Tensor:
    """What is launched goes into a graph: plans must be there, and the launches are those that serve any plan."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (triton_plan, triton_tpp):
            patch.setattr(module, "is_capturing", lambda tensor: True)
        return run()


class Relaunched:
    """A graph's stand-in."""

    def __init__(self, run: Callable[[], Tensor], out: Tensor) -> None:
        self._run = run
        self._out = out

    def replay(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_plan.StagedPlan, "stage", lambda self, plan: None)
            self._out.copy_(as_in_a_graph(self._run))


def capture(run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
    run()
    out = as_in_a_graph(run)
    return Relaunched(run, out), out


def words(folder: Path, with_graphs: bool) -> tuple[dict[str, list[int]], DecodeGraphs | None]:
    """Greedy tokens of requests that come one after the other, some over the same stem."""
    model = Decoder(folder, dtype=torch.float32, max_tokens=256)
    backend = get_backend("triton")
    problems = model.problems(CHUNK)
    kv = KVStore(backend, problems, num_slots=SLOTS)
    graphs = DecodeGraphs(model.forward, kv, device="cpu", max_rows=3, capture=capture) if with_graphs else None
    got: dict[str, list[int]] = {}

    def emit(events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, event in events:
            got.setdefault(request_id, []).extend(event.token_ids)

    engine = Engine(
        runner=ModelRunner(model, kv, graphs),
        tokenizer=Tokenizer(folder),
        emit=emit,
        config=EngineConfig(
            chunk_size=CHUNK, num_slots=SLOTS, chunk_bytes=1, max_sequence_tokens=128, max_running=4,
            max_step_tokens=64, max_waiting=16, plan=PlanOptions(num_workers=4, heads_per_worker_item=2),
        ),
    )  # fmt: skip
    for i, name in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=NEW_TOKENS + 2 * i, temperature=0.0, ignore_eos=True)
        engine.submit(Request(request_id=name, prompt_token_ids=prompts()[name], sampling=params))
        engine._take_messages(wait=False)
        for _ in range(2):
            engine.step()
    while engine.step():
        engine._take_messages(wait=False)
    engine.check()
    return got, graphs


def test_words_of_graphs_are_those_of_plain_steps(tmp_path: Path) -> None:
    folder = save(tmp_path, KIND, TWO_LAYERS)
    plain, _ = words(folder, with_graphs=False)
    replayed, graphs = words(folder, with_graphs=True)
    assert graphs is not None
    assert graphs.num_replays >= NEW_TOKENS
    assert replayed == plain


def test_graphs_that_hold_too_little_are_captured_anew(tmp_path: Path) -> None:
    folder = save(tmp_path, KIND, TWO_LAYERS)
    model = Decoder(folder, dtype=torch.float32, max_tokens=256)
    kv = KVStore(get_backend("triton"), model.problems(CHUNK), num_slots=SLOTS)
    captures = []

    def counted(run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        captures.append(run)
        return capture(run)

    graphs = DecodeGraphs(model.forward, kv, device="cpu", max_rows=2, capture=counted)
    with torch.inference_mode():
        graphs.capture_all()
        assert len(captures) == len(graph_sizes(2))
        long = build_plan(
            paths=[list(range(SLOTS))] * 40, kv_lens=[SLOTS * CHUNK] * 40, q_lens=[1] * 40,
            kv_present=[SLOTS * CHUNK] * 40, chunk_size=CHUNK, options=PlanOptions(share=False, num_workers=400),
        )  # fmt: skip
        graphs.make_room(long)
        short = build_plan(paths=[[3]], kv_lens=[5], q_lens=[1], kv_present=[4], chunk_size=CHUNK)
        logits = graphs.run([7], short)
        assert logits is not None
        assert logits.shape[0] == 1
    assert len(captures) == len(graph_sizes(2)) + 1


def test_a_step_of_more_rows_than_graphs_serve_is_not_theirs(tmp_path: Path) -> None:
    folder = save(tmp_path, KIND, TWO_LAYERS)
    model = Decoder(folder, dtype=torch.float32, max_tokens=256)
    kv = KVStore(get_backend("triton"), model.problems(CHUNK), num_slots=SLOTS)
    graphs = DecodeGraphs(model.forward, kv, device="cpu", max_rows=2, capture=capture)
    plan = build_plan(
        paths=[[i] for i in range(9)], kv_lens=[2] * 9, q_lens=[1] * 9, kv_present=[1] * 9, chunk_size=CHUNK
    )  # fmt: skip
    assert graphs.run([5] * 9, plan) is None
