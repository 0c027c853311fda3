"""The Triton kernels against the oracle: run by test_triton_tpp.py under Triton's interpreter, on a GPU where one is.

Under the interpreter programs run one after the other, so a race cannot show; the shuffled order shows a result that
depends on who comes first. Its alignment and tile limits are looser than the compiler's: test_triton_compile.py.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from chunkserve.kernels import triton_tpp
from chunkserve.kernels.dispatch import FP8, AttentionProblem, BackendError, LayerKV, attend, select_backend
from chunkserve.kernels.plan import AttentionPlan, PlanOptions, build_plan
from chunkserve.kernels.reference import TOLERANCE, oracle
from chunkserve.kernels.triton_plan import FIXED_SPLIT_FIELD
from chunkserve.kernels.triton_tpp import TritonBackend

from .attention_case import Case, fill, random_q, tree_case, worst_error
from .test_plan import OPTIONS, cases

DEVICE = "cpu" if triton_tpp.INTERPRETED else "cuda"
# A tree of two levels, whole and broken tails, one sequence without any.
TREE = tree_case([(1, 2), (2, 1)], [0, 5, 16, 33], chunk_size=16)


@pytest.fixture(autouse=True)
def programs_in_random_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not triton_tpp.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    rng = np.random.default_rng(0)
    order = np.zeros(0, np.int64)
    set_grid_idx = builder.set_grid_idx

    def shuffled(x: int, y: int, z: int) -> None:
        nonlocal order
        if x == 0:
            order = rng.permutation(builder.grid_dim[0])
        set_grid_idx(int(order[x]), y, z)

    monkeypatch.setattr(builder, "set_grid_idx", shuffled)
    yield


def _problem(dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (6, 2), d: int = 32, c: int = 16, **masks):
    return AttentionProblem(
        device=DEVICE,
        dtype=dtype,
        kv_dtype=dtype,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=d,
        chunk_size=c,
        **masks,
    )


def _filled(problem: AttentionProblem, case: Case, *, poison: bool = True) -> tuple[TritonBackend, LayerKV, Tensor]:
    backend = select_backend(problem, "triton")
    assert isinstance(backend, TritonBackend)
    kv = backend.allocate(problem, case.num_slots)
    if not poison:
        kv.k.zero_()
        kv.v.zero_()
    fill(backend, kv, case, poison=poison)
    return backend, kv, random_q(case, problem)


def _check(
    problem: AttentionProblem,
    case: Case,
    options: PlanOptions | None = None,
    *,
    alibi: bool = False,
    sinks: bool = False,
) -> Tensor:
    backend, kv, q = _filled(problem, case)
    per_head = torch.linspace(0.1, 1.5, problem.num_heads, device=DEVICE)
    extra = {"alibi_slopes": per_head if alibi else None, "sinks": per_head.flip(0) if sinks else None}
    out = attend(q, kv, case.plan(options), **extra)
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens, **extra)
    assert worst_error(out, want) <= TOLERANCE[problem.dtype]
    return out


def _fixed(case: Case, tokens: int) -> AttentionPlan:
    plan = case.plan(PlanOptions(fixed_split_tokens=tokens))
    assert plan.data[FIXED_SPLIT_FIELD] == tokens
    return plan


@pytest.mark.parametrize(
    ("dtype", "heads", "d", "c"),
    [
        (torch.float32, (6, 2), 64, 16),
        (torch.float16, (3, 1), 80, 32),
        (torch.bfloat16, (5, 1), 96, 64),
        (torch.float32, (7, 1), 32, 48),
        (torch.float16, (4, 4), 128, 16),
        pytest.param(torch.bfloat16, (8, 1), 256, 128, marks=pytest.mark.slow),
        pytest.param(torch.float32, (16, 1), 192, 256, marks=pytest.mark.slow),
        pytest.param(torch.float16, (9, 3), 64, 64, marks=pytest.mark.slow),
        pytest.param(torch.float32, (3, 1), 20, 16, marks=pytest.mark.slow),
    ],
)
def test_groups_head_dims_and_chunk_sizes(dtype: torch.dtype, heads: tuple[int, int], d: int, c: int):
    _check(_problem(dtype, heads, d, c), tree_case([(1, 1)], [0, 1, c - 1, c + 1], [1, 2], chunk_size=c))


def _fp8(dtype: torch.dtype, **sizes) -> AttentionProblem:
    return dataclasses.replace(_problem(dtype, **sizes), kv_dtype=FP8)


@pytest.mark.parametrize(
    ("dtype", "d", "c"),
    [(torch.float32, 32, 16), (torch.float16, 80, 48), (torch.bfloat16, 64, 64)],
)
def test_fp8_attends_to_what_it_holds(dtype: torch.dtype, d: int, c: int):
    _check(_fp8(dtype, d=d, c=c), tree_case([(1, 1)], [0, 1, c - 1, c + 1], [1, 2], chunk_size=c))


def test_fp8_append_rounds_and_scales_as_the_reference():
    problem = _fp8(torch.float16, d=40)
    case = tree_case([(1, 1)], [5, 20], chunk_size=16)
    pools = []
    for name in ("triton", "reference"):
        backend = select_backend(problem, name)
        kv = backend.allocate(problem, case.num_slots)
        fill(backend, kv, case, spread=30.0)
        # One token more for each, into chunks that have their scale.
        longer = dataclasses.replace(case, kv_lens=[n + 1 for n in case.kv_lens])
        k, v = (torch.full((2, 2, 40), x, device=DEVICE).half() for x in (1e4, 0.011))
        backend.append(kv, k, v, longer.plan())
        pools.append([backend.read_chunk(kv, slot) for slot in set(np.concatenate(case.paths).tolist())])
    for ours, want in zip(*pools, strict=True):
        for a, b in zip(ours, want, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("dtype", "q_lens"),
    [
        (torch.float16, [1, 40]),
        (torch.bfloat16, [20]),
        pytest.param(torch.float16, [70, 1, 9], marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, [70, 1, 9], marks=pytest.mark.slow),
    ],
)
def test_every_tile_class(dtype: torch.dtype, q_lens: list[int]):
    """Rows of an item from 4 to 320: private tails, shared runs, prefill over a cached prefix."""
    _check(_problem(dtype, (4, 1), c=64), tree_case([(1, 2)], [3, 70, 90], q_lens, chunk_size=64))


@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
def test_window_edges_in_shared_and_private_chunks(window: int):
    _check(_problem(window=window), TREE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("q_len", [1, 40])
def test_all_masks_together(dtype: torch.dtype, q_len: int):
    problem = _problem(dtype, (2, 1), window=25, softcap=2.0)
    _check(problem, tree_case([(1, 3)], [5, 41], q_len, chunk_size=16), alibi=True, sinks=True)


@pytest.mark.parametrize(
    "masks", [{"softcap": 1.5}, {"alibi": True}, {"sinks": True}, {"alibi": True, "sinks": True, "window": 20}]
)
def test_each_mask(masks: dict[str, object]):
    problem = _problem(**{name: value for name, value in masks.items() if name in ("softcap", "window")})
    flags = {name: True for name in masks if name in ("alibi", "sinks")}
    _check(problem, TREE, **flags)
    # Without sharing and splits no row is merged: the sink enters in the direct write.
    _check(problem, TREE, PlanOptions(share=False), **flags)


@pytest.mark.parametrize("batch", [1, 17, pytest.param(65, marks=pytest.mark.slow)])
def test_batches(batch: int):
    _check(_problem(heads=(1, 1)), tree_case([(1, 4)], [5] * batch, chunk_size=16))


def test_small_group_at_the_end_of_a_batch():
    case = tree_case([(1, 1), (2, 2)], [4] * 10, chunk_size=16)
    _check(_problem(torch.float16, (2, 1)), case, PlanOptions(num_workers=8, min_split_tokens=16))


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(cases(), OPTIONS)
def test_random_plans(case: Case, options: PlanOptions):
    _check(_problem(heads=(3, 1)), case, options)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), OPTIONS)
def test_many_random_plans(case: Case, options: PlanOptions):
    _check(_problem(torch.float16, heads=(3, 1), window=50), case, options, alibi=True, sinks=True)


@pytest.mark.parametrize("window", [None, 20])
def test_poisoned_memory_changes_no_bit(window: int | None):
    problem = _problem(torch.float16, window=window)
    plan = TREE.plan()
    _, zeros, q = _filled(problem, TREE, poison=False)
    _, poisoned, _ = _filled(problem, TREE)
    if window is not None:
        # What no window reaches may be gone from the pool.
        gone = min(TREE.kv_lens) - window
        assert gone > 16
        poisoned.k[TREE.paths[0][0]] = torch.nan
        poisoned.v[TREE.paths[0][0]] = torch.nan
    assert torch.equal(attend(q, zeros, plan), attend(q, poisoned, plan))


def test_placement_changes_no_bit():
    problem = _problem(torch.float16)
    moved = dataclasses.replace(TREE, paths=[(TREE.num_slots - 1 - p).astype(np.int32) for p in TREE.paths])
    outs = []
    for case in (TREE, moved):
        _, kv, q = _filled(problem, case)
        outs.append(attend(q, kv, case.plan()))
    assert torch.equal(*outs)


@pytest.fixture
def dot_without_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose sums do not depend on a row's place in the tile, as on a GPU; those of BLAS do."""
    if not triton_tpp.INTERPRETED:
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        products = a.data.astype(np.float32)[:, None, :] * b.data.astype(np.float32).T[None]
        return interpreter.TensorHandle(products.sum(-1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("dot_without_blas")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 6])
def test_fixed_splits_give_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, q_len: int):
    case = tree_case([(1, 3)], [5, 20, 17, 40, 1], q_len, chunk_size=16)
    problem = _problem(dtype, (4, 1))
    _, kv, q = _filled(problem, case)
    together = attend(q, kv, _fixed(case, 32))
    for i, rows in enumerate(q.split(case.q_lens)):
        alone = dataclasses.replace(
            case, paths=case.paths[i : i + 1], kv_lens=case.kv_lens[i : i + 1], q_lens=case.q_lens[i : i + 1]
        )
        assert torch.equal(attend(rows, kv, _fixed(alone, 32)), together.split(case.q_lens)[i])


def test_a_piece_past_a_row_is_an_empty_partial():
    # New tokens at 20..39: the first ones see nothing of the piece that begins at 32.
    case = tree_case([], [40], 20, chunk_size=16)
    plan = _fixed(case, 32)
    assert plan.num_partials == 40
    problem = _problem()
    backend, kv, q = _filled(problem, case)
    out = attend(q, kv, plan)
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
    assert worst_error(out, want) <= TOLERANCE[torch.float32]


def test_large_and_far_apart_logits():
    problem = _problem(heads=(2, 1))
    case = tree_case([(1, 2)], [9, 9], chunk_size=16)
    backend, kv, q = _filled(problem, case)
    for scale in (1e3, 1e-3):
        out = attend(q, kv, case.plan(), scale=scale)
        want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens, scale=scale)
        assert worst_error(out, want) <= 20 * TOLERANCE[torch.float32]


def test_flat_attention_over_many_keys_keeps_its_mean():
    problem = _problem(torch.float16, (1, 1), c=256)
    case = tree_case([], [4096], chunk_size=256)
    backend, kv, q = _filled(problem, case)
    kv.k.fill_(1.0)
    kv.v.add_(30)
    values = torch.cat([backend.read_chunk(kv, int(slot))[1] for slot in case.paths[0]]).double()
    torch.testing.assert_close(attend(q, kv, case.plan()).double()[0], values.mean(0), rtol=1e-3, atol=0)


def test_views_of_one_qkv_product():
    problem = _problem(heads=(4, 2))
    case = tree_case([(1, 1)], [3, 7], chunk_size=16)
    backend, kv, q = _filled(problem, case)
    qkv = torch.randn(2, 8, 32, device=DEVICE)
    qkv[:, :4] = q
    plan = case.plan()
    backend.append(kv, qkv[:, 4:6], qkv[:, 6:], plan)
    for row, (slot, offset) in enumerate(zip(plan.write_slot, plan.write_offset, strict=True)):
        for chunk, new in zip(backend.read_chunk(kv, int(slot)), (qkv[row, 4:6], qkv[row, 6:]), strict=True):
            assert torch.equal(chunk[offset], new)
    assert torch.equal(attend(qkv[:, :4], kv, plan), attend(q, kv, plan))


def test_a_copied_chunk_reads_alike():
    case = tree_case([(1, 1)], [3, 7], chunk_size=16)
    backend, kv, _ = _filled(_problem(), case)
    source, target = int(case.paths[0][0]), int(set(range(case.num_slots)).difference(*case.paths).pop())
    backend.copy_rows(kv, source, target, 9)
    for old, new in zip(backend.read_chunk(kv, source), backend.read_chunk(kv, target), strict=True):
        assert torch.equal(old[:9], new[:9])
        assert new[9:].isnan().all()


@pytest.mark.parametrize("other_plan_between", [False, True])
def test_a_grown_plan_is_followed(other_plan_between: bool):
    problem = _problem(heads=(2, 1))
    case = tree_case([(1, 2)], [3, 7, 15], chunk_size=16)
    (free, _) = set(range(case.num_slots)) - set(np.concatenate(case.paths).tolist())
    case.paths[2] = np.append(case.paths[2], np.int32(free))
    backend, kv, q = _filled(problem, case)
    plan = case.plan()
    attend(q, kv, plan)
    for new_chunks in ({}, {2: free}, {}):
        assert plan.grow(new_chunks)
        k, v = (torch.randn(3, 1, 32, device=DEVICE) for _ in range(2))
        backend.append(kv, k, v, plan)
        case = dataclasses.replace(case, kv_lens=[n + 1 for n in case.kv_lens])
        if other_plan_between:
            attend(q[:1], kv, dataclasses.replace(TREE, **_first_sequence(case)).plan())
        want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
        assert worst_error(attend(q, kv, plan), want) <= TOLERANCE[torch.float32]


def _first_sequence(case: Case) -> dict[str, object]:
    return {"paths": case.paths[:1], "kv_lens": case.kv_lens[:1], "q_lens": [1], "num_slots": case.num_slots}


def test_an_empty_plan_gives_an_empty_result():
    problem = _problem()
    backend, kv, _ = _filled(problem, TREE)
    plan = build_plan(paths=[], kv_lens=[], q_lens=[], kv_present=[], chunk_size=16)
    none = torch.empty(0, 2, 32, device=DEVICE)
    backend.append(kv, none, none, plan)
    assert attend(torch.empty(0, 6, 32, device=DEVICE), kv, plan).shape == (0, 6, 32)


def test_per_head_numbers_of_another_shape_are_refused():
    _, kv, q = _filled(_problem(), TREE)
    with pytest.raises(BackendError, match=r"sinks is \(5,\) torch.float32 on .*, expected \[6\] float32"):
        attend(q, kv, TREE.plan(), sinks=torch.zeros(5, device=DEVICE))


def test_partial_results_that_a_graph_holds_do_not_move():
    backend = triton_tpp.TritonBackend()
    kv = backend.allocate(_problem(), 4)
    backend.reserve(kv, plan_ints=8192, partials=10)
    backend._lane(kv.problem, kv.k.device).staged.freeze()
    backend.reserve(kv, plan_ints=8192, partials=10)
    with pytest.raises(BackendError, match="11 partials do not fit the 10 that a CUDA graph holds"):
        backend.reserve(kv, plan_ints=0, partials=11)
    backend.release(kv)
    backend.reserve(kv, plan_ints=0, partials=11)


@pytest.mark.skipif(triton_tpp.INTERPRETED, reason="captures a CUDA graph")
def test_a_captured_graph_serves_later_plans():
    problem = _problem(torch.float16, (8, 2), 64, 64)
    big = tree_case([(1, 8)], [100] * 16, chunk_size=64)
    small = tree_case([(2, 3)], [5, 70, 64], chunk_size=64)
    backend, kv, q = _filled(problem, big)
    plan = big.plan(PlanOptions(num_workers=64))
    backend.reserve(kv, plan_ints=4 * len(plan.data), partials=4 * plan.num_partials)
    attend(q, kv, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, kv, plan)
    for case in (big, small):
        fill(backend, kv, dataclasses.replace(case, num_slots=big.num_slots))
        plan = case.plan(PlanOptions(num_workers=64))
        q.copy_(torch.randn_like(q))
        backend.stage(kv, plan)
        graph.replay()
        rows = q[: case.num_rows]
        want = oracle(rows, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
        assert worst_error(out[: case.num_rows], want) <= TOLERANCE[torch.float16]
