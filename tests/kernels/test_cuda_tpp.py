"""The CUDA kernels on this machine's processor (cuda_host/), against the oracle, over every edge that it can show."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkserve.kernels import cuda_tpp
from chunkserve.kernels.cuda_tpp import CudaBackend, device_plan
from chunkserve.kernels.dispatch import FP8, AttentionProblem, BackendError, LayerKV, get_backend, select_backend
from chunkserve.kernels.plan import PlanOptions, build_plan
from chunkserve.kernels.reference import TOLERANCE, oracle

from .attention_case import Case, fill, random_q, tree_case, worst_error
from .cuda_host_kernels import SM_80, SM_86, SM_90, HostKernels, host_folder, host_loader

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BFLOAT, FLOAT]


folder = host_folder


@pytest.fixture(scope="module")
def backend(folder: Path) -> CudaBackend:
    return CudaBackend(load=host_loader(folder))


def _problem(
    dtype: torch.dtype = HALF,
    heads: tuple[int, int] = (6, 2),
    d: int = 64,
    c: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    kv_dtype: torch.dtype | None = None,
) -> AttentionProblem:
    return AttentionProblem(
        device="cpu",
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=d,
        chunk_size=c,
        window=window,
        softcap=softcap,
    )


def _filled(backend: CudaBackend, problem: AttentionProblem, case: Case) -> tuple[LayerKV, Tensor]:
    kv = backend.allocate(problem, case.num_slots)
    fill(backend, kv, case)
    return kv, random_q(case, problem)


def _attend(backend: CudaBackend, q: Tensor, kv: LayerKV, plan, **extra: Tensor | None) -> Tensor:
    """With NaN in the workspace, as a step before may have left it."""
    backend.reserve(kv, plan_ints=0, partials=plan.num_partials)
    lane = backend._lane(kv.problem, kv.k.device)
    lane.partial_out.fill_(torch.nan)
    lane.partial_lse_log2.fill_(torch.nan)
    return backend.attend(q, kv, plan, scale=kv.problem.head_dim**-0.5, **extra)


def _check(
    backend: CudaBackend,
    problem: AttentionProblem,
    case: Case,
    options: PlanOptions | None = None,
    **extra: Tensor | None,
) -> None:
    kv, q = _filled(backend, problem, case)
    out = _attend(backend, q, kv, case.plan(options), **extra)
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens, **extra)
    assert worst_error(out, want) <= TOLERANCE[problem.dtype]


_slow = pytest.mark.slow  # each head dim and dtype is compiled once


@pytest.mark.parametrize(
    ("dtype", "d"),
    [
        (HALF, 80),
        (HALF, 128),
        (HALF, 256),
        (FLOAT, 256),
        pytest.param(HALF, 16, marks=_slow),
        pytest.param(HALF, 96, marks=_slow),
        pytest.param(HALF, 208, marks=_slow),
        pytest.param(BFLOAT, 128, marks=_slow),
        pytest.param(FLOAT, 80, marks=_slow),
    ],
)
def test_head_dims(backend: CudaBackend, dtype: torch.dtype, d: int):
    _check(backend, _problem(dtype, d=d), tree_case([(1, 2), (2, 2)], [0, 5, 16, 33], [1, 1, 7], chunk_size=16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [16, 32, 48, 64, 128])
def test_chunk_sizes_and_lengths_around_them(backend: CudaBackend, dtype: torch.dtype, c: int):
    _check(backend, _problem(dtype, c=c), tree_case([(1, 1)], [0, 1, c - 1, c, c + 1], [1, 2], chunk_size=c))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (10, 2), (7, 1), (16, 2), (16, 1)])
def test_groups(backend: CudaBackend, heads: tuple[int, int]):
    _check(backend, _problem(heads=heads), tree_case([(1, 3), (2, 1)], [3, 17, 1, 0, 40], chunk_size=16))


@pytest.mark.parametrize(("chunks", "private"), [(8, 0), (0, 100), (4, 64)])
def test_ends_of_the_papers_table_3(backend: CudaBackend, chunks: int, private: int):
    _check(backend, _problem(heads=(2, 2), c=32), tree_case([(1, chunks)], [private] * 32, chunk_size=32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_over_a_cached_prefix(backend: CudaBackend, dtype: torch.dtype):
    case = tree_case([(1, 2), (2, 1)], [30, 70, 1, 100], [25, 70, 1, 90], chunk_size=16)
    _check(backend, _problem(dtype, (3, 1)), case)
    _check(backend, _problem(dtype, (3, 1)), case, PlanOptions(num_workers=8, min_split_tokens=16))


MASKS = [
    pytest.param(5, None, False, False, id="window inside the private part"),
    pytest.param(40, None, False, False, id="window edge inside the shared part"),
    pytest.param(1000, None, False, False, id="window over all keys"),
    pytest.param(1, None, False, True, id="window of one key, sinks"),
    pytest.param(None, 2.0, False, False, id="soft-cap"),
    pytest.param(None, None, True, False, id="alibi"),
    pytest.param(None, None, False, True, id="sinks"),
    pytest.param(37, 3.0, True, True, id="all"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap", "alibi", "sinks"), MASKS)
def test_masks_and_biases(
    backend: CudaBackend, dtype: torch.dtype, window: int | None, softcap: float | None, alibi: bool, sinks: bool
):
    problem = _problem(dtype, (4, 2), window=window, softcap=softcap)
    case = tree_case([(1, 2), (2, 1)], [0, 9, 40, 17], [1, 3, 20], chunk_size=16)
    extra = {
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 0.0]) if alibi else None,
        "sinks": torch.tensor([2.0, -1.0, 0.0, 30.0]) if sinks else None,
    }
    _check(backend, problem, case, **extra)
    _check(backend, problem, case, PlanOptions(num_workers=8, min_split_tokens=16), **extra)
    _check(backend, problem, case, PlanOptions(share=False), **extra)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    levels = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=2))
    private = draw(st.lists(st.integers(0 if levels else 1, 50), min_size=1, max_size=6))
    q_lens = draw(st.lists(st.sampled_from([1, 1, 2, 30]), min_size=1, max_size=3))
    return tree_case(levels, private, q_lens, chunk_size=16, seed=draw(st.integers(0, 9)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    _cases(),
    st.sampled_from([None, PlanOptions(num_workers=6, min_split_tokens=16), PlanOptions(fixed_split_tokens=32)]),
    st.sampled_from([*((d, None) for d in DTYPES), (HALF, FP8), (FLOAT, FP8)]),
    st.sampled_from([(1, 1), (4, 4), (9, 3), (7, 1), (5, 1)]),
    st.sampled_from([None, 3, 33]),
)
def test_random_trees(
    backend: CudaBackend,
    case: Case,
    options: PlanOptions | None,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    heads: tuple[int, int],
    window: int | None,
):
    _check(backend, _problem(dtypes[0], heads, window=window, kv_dtype=dtypes[1]), case, options)


@pytest.mark.parametrize(
    ("dtype", "d", "c"),
    [
        (HALF, 64, 16),
        (FLOAT, 64, 48),
        (HALF, 64, 256),
        pytest.param(BFLOAT, 80, 64, marks=_slow),
        pytest.param(HALF, 96, 128, marks=_slow),
        pytest.param(HALF, 256, 16, marks=_slow),
        pytest.param(FLOAT, 256, 32, marks=_slow),
    ],
)
def test_fp8_attends_to_what_it_holds(backend: CudaBackend, dtype: torch.dtype, d: int, c: int):
    """The longest item has more than 32 chunks of 16: the scales after those are read later."""
    case = tree_case([(1, 2), (2, 1)], [0, 5, c + 1, 601], [1, 3, 30], chunk_size=c)
    _check(backend, _problem(dtype, d=d, c=c, kv_dtype=FP8), case)
    masked = _problem(dtype, d=d, c=c, window=20, softcap=3.0, kv_dtype=FP8)
    extra = {"alibi_slopes": torch.linspace(0.1, 0.6, 6), "sinks": torch.linspace(-2, 2, 6)}
    _check(backend, masked, case, PlanOptions(num_workers=4, min_split_tokens=16), **extra)


@pytest.mark.parametrize(
    ("dtype", "d"),
    [(HALF, 64), (FLOAT, 64), pytest.param(BFLOAT, 80, marks=_slow), pytest.param(HALF, 256, marks=_slow)],
)
def test_fp8_append_rounds_and_scales_as_the_reference(backend: CudaBackend, dtype: torch.dtype, d: int):
    """Rows that open a chunk, that follow one of another slot, and that open some chunks and fill others."""
    problem = _problem(dtype, d=d, kv_dtype=FP8)
    case = tree_case([(1, 1)], [1, 2, 5, 40], [1, 1, 3, 30], chunk_size=16)
    sizes = torch.logspace(-4, 4, case.num_rows)[:, None, None]  # many are denormal or saturate
    k = (torch.randn(case.num_rows, 3, 2, d) * sizes[..., None]).to(dtype)[:, 1]
    v = (torch.randn(case.num_rows, 2, d + 16) * sizes).to(dtype)[..., :d]
    k[0, 0] = 0.0
    k[0, 1] = 1e-35  # 0 in fp16
    pools = []
    for one in (backend, select_backend(problem, "reference")):
        kv = one.allocate(problem, case.num_slots)
        fill(one, kv, case)
        one.append(kv, k, v, case.plan())
        one.copy_rows(kv, int(case.paths[0][0]), int(case.paths[1][-1]), 3)
        pools.append(kv)
    for slot in set(np.concatenate(case.paths).tolist()):
        ours, want = ([*backend.read_chunk(kv, slot), kv.k_scale[slot], kv.v_scale[slot]] for kv in pools)
        for a, b in zip(ours, want, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((d, d) for d in DTYPES), (HALF, FP8)])
def test_chunks_that_no_window_reaches_may_be_gone(backend: CudaBackend, dtype: torch.dtype, kv_dtype: torch.dtype):
    """A step of 32 keys may hold a chunk that is gone beside one that the window begins in."""
    case = tree_case([(1, 4)], [40, 41, 44], chunk_size=16)
    kv, q = _filled(backend, _problem(dtype, window=50, kv_dtype=kv_dtype), case)
    there = _attend(backend, q, kv, case.plan())
    for path in case.paths:
        slot = path[2]  # keys 32 to 47; the window of the shortest sequence begins at 54
        kv.k.view(torch.uint8)[slot] = kv.v.view(torch.uint8)[slot] = 0xFF
        for scales in (kv.k_scale, kv.v_scale):
            if scales is not None:
                scales[slot] = torch.nan
    assert torch.equal(_attend(backend, q, kv, case.plan()), there)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((d, d) for d in DTYPES), (HALF, FP8)])
def test_unused_memory_does_not_leak(backend: CudaBackend, dtype: torch.dtype, kv_dtype: torch.dtype):
    case = tree_case([(1, 2)], [5, 16, 33, 7], [1, 3], chunk_size=16, seed=9)
    assert all(0 not in path for path in case.paths)  # the slot that stands in for chunks past the last
    kv, q = _filled(backend, _problem(dtype, kv_dtype=kv_dtype), case)
    poisoned = _attend(backend, q, kv, case.plan())
    for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if tensor is not None:
            tensor.copy_(tensor.float().nan_to_num(0.0))
    assert not poisoned.isnan().any()
    assert torch.equal(_attend(backend, q, kv, case.plan()), poisoned)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((d, d) for d in DTYPES), (HALF, FP8)])
def test_deterministic_mode_gives_the_same_bits_alone_and_in_a_batch(
    backend: CudaBackend, dtype: torch.dtype, kv_dtype: torch.dtype
):
    """The larger group fills teams of four warps, a sequence alone takes one."""
    options = PlanOptions(fixed_split_tokens=32)
    case = tree_case([(1, 5), (2, 2)], [3, 16, 40, 1, 70, 5], [1, 1, 9], chunk_size=16)
    kv, q = _filled(backend, _problem(dtype, (7, 1), kv_dtype=kv_dtype), case)
    sinks = torch.linspace(-2, 2, 7)
    together = _attend(backend, q, kv, case.plan(options), sinks=sinks)
    unshared = _attend(backend, q, kv, case.plan(dataclasses.replace(options, share=False)), sinks=sinks)
    assert torch.equal(unshared, together)
    for i in range(len(case.paths)):
        alone = build_plan(
            paths=case.paths[i : i + 1],
            kv_lens=case.kv_lens[i : i + 1],
            q_lens=case.q_lens[i : i + 1],
            kv_present=[0],
            chunk_size=16,
            options=options,
        )
        rows = slice(sum(case.q_lens[:i]), sum(case.q_lens[: i + 1]))
        assert torch.equal(_attend(backend, q[rows], kv, alone, sinks=sinks), together[rows])


def test_bits_do_not_depend_on_slots_or_on_the_order_of_threads(folder: Path):
    outs = []
    for seed in range(3):
        backend = CudaBackend(load=host_loader(folder, seed=100 * seed))
        case = tree_case([(1, 5), (3, 2)], [0, 5, 16, 33, 100, 7], [1, 1, 9], chunk_size=16, seed=seed)
        # Filled in the order of the paths, so that all seeds have the same values.
        kv, q = _filled(backend, _problem(), case)
        outs.append(_attend(backend, q, kv, case.plan(PlanOptions(num_workers=4, min_split_tokens=16))))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_size_of_shared_memory(folder: Path):
    case = tree_case([(1, 5)], [0, 5, 16, 33, 100, 7], [1, 1, 30], chunk_size=16)
    shapes, outs = [], []
    for limit in (SM_80, SM_86, SM_90):
        load = host_loader(folder, shared_limit=limit)
        backend = CudaBackend(load=load)
        problem = _problem(heads=(4, 1), d=128)
        kv, q = _filled(backend, problem, case)
        kernels = load(problem, kv.k.device)
        shapes.append((kernels.warps, kernels.stages))
        outs.append(_attend(backend, q, kv, case.plan()))
    assert shapes == [(4, 2), (2, 2), (4, 3)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_growing_plan_is_staged_again(backend: CudaBackend):
    problem = _problem()
    case = tree_case([(1, 2)], [9, 3], chunk_size=16)
    kv, _ = _filled(backend, problem, case)
    plan = case.plan()
    for step in range(5):
        plan.grow()
        k, v = (torch.randn(2, 2, 64).half() for _ in range(2))
        backend.append(kv, k, v, plan)
        q = random_q(case, problem, seed=step)
        lens = [n + step + 1 for n in case.kv_lens]
        want = oracle(q, kv, backend, paths=case.paths, kv_lens=lens, q_lens=[1, 1])
        assert worst_error(_attend(backend, q, kv, plan), want) <= TOLERANCE[HALF]


def test_what_a_cuda_graph_holds_does_not_move(folder: Path, monkeypatch: pytest.MonkeyPatch):
    backend = CudaBackend(load=host_loader(folder))
    small, large = tree_case([], [9, 3], chunk_size=16), tree_case([(1, 2)], [9] * 99, chunk_size=16)
    problem = _problem(heads=(1, 1))
    kv, q = _filled(backend, problem, small)
    lane = backend._lane(problem, kv.k.device)
    launched: list[str] = []
    monkeypatch.setattr(lane.kernels, "launch", lambda kernel, params: launched.append(kernel))
    monkeypatch.setattr(cuda_tpp, "_is_capturing", lambda kv: True)
    plan = small.plan()
    with pytest.raises(BackendError, match="the plan is not on the device: call stage before"):
        _attend(backend, q, kv, plan)
    monkeypatch.setattr(cuda_tpp, "_is_capturing", lambda kv: False)
    backend.stage(kv, plan)
    monkeypatch.setattr(cuda_tpp, "_is_capturing", lambda kv: True)
    _attend(backend, q, kv, plan)
    # The merge is captured for later plans, though this one has no partial results.
    assert (plan.num_partials, launched) == (0, ["tpp_segment", "tpp_merge"])
    monkeypatch.setattr(cuda_tpp, "_is_capturing", lambda kv: False)
    with pytest.raises(BackendError, match=r"198 partials do not fit 0, and a CUDA graph holds its address"):
        backend.stage(kv, large.plan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_append_writes_its_rows_and_nothing_else(backend: CudaBackend, dtype: torch.dtype, shift: int):
    c, d = 48, 64
    kv = backend.allocate(_problem(dtype, d=d, c=c), 3)
    kv.k.zero_()
    kv.v.zero_()
    path = np.array([2, 0], np.int32)
    plan = build_plan(paths=[path], kv_lens=[c + 5], q_lens=[9], kv_present=[c - 2], chunk_size=c)
    # Strided rows, as a split of one projection gives them; shifted by one value they are not aligned.
    both = torch.randn(9, 2, 2, d + shift).to(dtype)[..., shift:]
    backend.append(kv, both[:, 0], both[:, 1], plan)
    for side in (0, 1):
        first, second = backend.read_chunk(kv, 2)[side], backend.read_chunk(kv, 0)[side]
        assert torch.equal(first[-2:], both[2:4, side])
        assert torch.equal(second[:5], both[4:, side])
        assert not first[:-2].any()
        assert not second[5:].any()
        assert not backend.read_chunk(kv, 1)[side].any()


def test_copy_rows(backend: CudaBackend):
    kv = backend.allocate(_problem(), 2)
    kv.k.normal_()
    kv.v.zero_()
    before = backend.read_chunk(kv, 1)[0]
    backend.copy_rows(kv, 0, 1, 5)
    after = backend.read_chunk(kv, 1)[0]
    assert torch.equal(after[:5], backend.read_chunk(kv, 0)[0][:5])
    assert torch.equal(after[5:], before[5:])
    with pytest.raises(BackendError, match=r"cannot copy 17 rows of a chunk of 16 \(chunk_size\)"):
        backend.copy_rows(kv, 0, 1, 17)


def test_strided_and_unaligned_queries(backend: CudaBackend):
    case = tree_case([(1, 3)], [5, 40], chunk_size=16)
    kv, q = _filled(backend, _problem(), case)
    want = _attend(backend, q, kv, case.plan())
    wide = torch.randn(2, 8, 100).half()
    for column in (2, 3):
        view = wide[:, 1:7, column : column + 64]
        view.copy_(q)
        assert torch.equal(_attend(backend, view, kv, case.plan()), want)
    turned = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(_attend(backend, turned, kv, case.plan()), want)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("offset", [-6e4, 0.0, 5e4])
def test_extreme_logits(backend: CudaBackend, dtype: torch.dtype, offset: float):
    """Every logit is huge, one key stands out by 5000: softmax picks it."""
    problem = _problem(dtype, heads=(1, 1))
    case = tree_case([(1, 2)], [20, 3], chunk_size=16)
    kv, q = _filled(backend, problem, case)
    winner, n = 21, case.kv_lens[0]
    k = torch.zeros(n, 1, 64)
    k[:, 0, 0] = offset
    k[winner, 0, 0] = offset + 5000
    v = torch.randn(n, 1, 64).to(dtype)
    fresh = build_plan(paths=case.paths[:1], kv_lens=[n], q_lens=[n], kv_present=[0], chunk_size=16)
    backend.append(kv, k.to(dtype), v, fresh)
    q = torch.zeros_like(q)
    q[:, 0, 0] = 1.0
    out = backend.attend(q, kv, case.plan(), scale=1.0)
    torch.testing.assert_close(out[0], v[winner])


def test_flat_attention_over_many_keys_is_the_mean(backend: CudaBackend):
    n = 9_000
    case = tree_case([], [n], chunk_size=128)
    kv, _ = _filled(backend, _problem(heads=(1, 1), c=128), case)
    v = (torch.randn(n, 1, 64) + 30).half()
    plan = build_plan(paths=case.paths, kv_lens=[n], q_lens=[n], kv_present=[0], chunk_size=128)
    backend.append(kv, torch.ones(n, 1, 64).half(), v, plan)
    out = _attend(backend, torch.ones(1, 1, 64).half(), kv, case.plan())
    torch.testing.assert_close(out.float()[0], v.double().mean(0).float(), rtol=1e-3, atol=0)


def test_high_slots_are_addressed_in_64_bits(backend: CudaBackend):
    """A pool of more than 2^31 values, of which one chunk is touched."""
    num_slots = 2**31 // (8 * 128 * 64) + 2
    kv = backend.allocate(_problem(heads=(8, 8), c=128), num_slots)
    outs = []
    for slot in (1, num_slots - 1):
        path = [np.array([slot], np.int32)]
        plan = build_plan(paths=path, kv_lens=[9], q_lens=[9], kv_present=[0], chunk_size=128)
        torch.manual_seed(0)
        backend.append(kv, torch.randn(9, 8, 64).half(), torch.randn(9, 8, 64).half(), plan)
        outs.append(backend.attend(torch.randn(9, 8, 64).half(), kv, plan, scale=0.125))
    assert torch.equal(outs[0], outs[1])


@given(_cases(), st.integers(1, 9), st.sampled_from([2, 4]))
@settings(deadline=None)
def test_row_tiles_cover_each_row_of_each_item_once(case: Case, group: int, max_warps: int):
    plan = case.plan()
    flat = device_plan(plan, group=group, max_warps=max_warps)
    counts, at = flat[1:4], int(flat[4])
    covered = [np.zeros((e - b) * group, int) for b, e in zip(plan.item_q_begin, plan.item_q_end, strict=True)]
    for warps, count in zip((4, 2, 1), counts, strict=True):
        assert count == 0 or warps <= max_warps
        for item, first in flat[at : at + 2 * count].reshape(-1, 2):
            rows = covered[item][first : first + 16 * warps]
            # No smaller team would do.
            assert len(rows) > (0 if warps == 1 else 8 * warps)
            rows += 1
        at += 2 * int(count)
    assert at == len(flat)
    assert all((c == 1).all() for c in covered)


def test_workers_are_warps(backend: CudaBackend):
    problem = _problem()
    backend.allocate(problem, 1)
    assert backend.num_workers(problem) == 3 * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "device is cpu"),
        ({"kv_dtype": FLOAT}, r"dtypes torch.float16 and torch.float32 are not one of"),
        ({"head_dim": 72}, "head_dim 72 is no multiple of 16 up to 256"),
        ({"chunk_size": 24}, "chunk_size 24 is no multiple of 16 up to 256"),
    ],
)
def test_rejects_with_the_reason(change: dict, reason: str):
    problem = dataclasses.replace(_problem(), **{"device": "cuda"} | change)
    assert reason in (get_backend("cuda").reject(problem) or "").replace("\n", " ")


def test_host_kernels_name_what_they_have(folder: Path):
    kernels = host_loader(folder)(_problem(), torch.device("cpu"))
    assert isinstance(kernels, HostKernels)
    assert (kernels.warps, kernels.stages) == (4, 2)
