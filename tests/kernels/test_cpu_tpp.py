"""The native CPU kernels against the oracle, with every instruction set of this CPU, over the known edge cases."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkserve.kernels import _cpu
from chunkserve.kernels.cpu_ops import rounds_to_bfloat16
from chunkserve.kernels.dispatch import (
    FP8,
    AttentionProblem,
    Backend,
    BackendError,
    LayerKV,
    attend,
    select_backend,
)
from chunkserve.kernels.plan import AttentionPlan, PlanError, PlanOptions, build_plan
from chunkserve.kernels.reference import TOLERANCE, oracle

from .attention_case import Case, fill, random_q, tree_case, worst_error
from .test_plan import OPTIONS, cases

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=_cpu.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(before)


def _problem(dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (6, 2), d: int = 64, c: int = 16):
    return AttentionProblem(
        device="cpu",
        dtype=dtype,
        kv_dtype=dtype,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=d,
        chunk_size=c,
    )


def _filled(problem: AttentionProblem, case: Case, *, poison: bool = True) -> tuple[Backend, LayerKV, Tensor]:
    backend = select_backend(problem, "cpu")
    kv = backend.allocate(problem, case.num_slots)
    fill(backend, kv, case, poison=poison)
    return backend, kv, random_q(case, problem)


def _check(problem: AttentionProblem, case: Case, options: PlanOptions | None = None) -> Tensor:
    backend, kv, q = _filled(problem, case)
    out = attend(q, kv, case.plan(options))
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
    assert worst_error(out, want) <= TOLERANCE[problem.dtype]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [8, 32, 40, 64, 80, 96, 112, 128, 192, 256])
def test_head_dims(dtype: torch.dtype, d: int):
    _check(_problem(dtype, d=d), tree_case([(1, 2), (2, 2)], [0, 5, 16, 33], chunk_size=16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [16, 48, 64, 80, 96, 128, 256])
def test_chunk_sizes_and_lengths_around_them(dtype: torch.dtype, c: int):
    _check(_problem(dtype, c=c), tree_case([(1, 1)], [0, 1, c - 1, c, c + 1, 2 * c], [1, 2], chunk_size=c))


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (10, 2), (6, 1), (14, 2), (16, 1), (9, 3), (64, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups(dtype: torch.dtype, heads: tuple[int, int]):
    _check(_problem(dtype, heads), tree_case([(1, 3), (2, 1)], [3, 17, 1, 0, 40], chunk_size=16))


@pytest.mark.parametrize("batch", [1, 2, 17, 65, 80, 97, 112, 129, 257])
def test_batches(batch: int):
    _check(_problem(heads=(2, 2), d=32), tree_case([(1, 4)], [5] * batch, chunk_size=16))


def test_a_pair_that_shares_at_the_end_of_a_large_batch():
    pair = tree_case([(1, 4)], [3, 9], chunk_size=16)
    others = tree_case([], [20] * 126, chunk_size=16)
    case = Case(
        paths=[*others.paths, *[p + others.num_slots for p in pair.paths]],
        kv_lens=others.kv_lens + pair.kv_lens,
        q_lens=others.q_lens + pair.q_lens,
        chunk_size=16,
        num_slots=others.num_slots + pair.num_slots,
    )
    _check(_problem(heads=(2, 2), d=32), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunks", "private"), [(8, 0), (0, 128), (4, 64)])
def test_ends_of_the_papers_table_3(dtype: torch.dtype, chunks: int, private: int):
    _check(_problem(dtype, (4, 4), c=64), tree_case([(1, chunks)], [private] * 32, chunk_size=64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_over_a_cached_prefix(dtype: torch.dtype):
    case = tree_case([(1, 2), (2, 1)], [30, 70, 1, 200], [25, 70, 1, 130], chunk_size=16)
    _check(_problem(dtype), case)
    _check(_problem(dtype), case, PlanOptions(num_workers=8, min_split_tokens=16))


def test_cold_prefill_of_many_rows():
    _check(_problem(heads=(3, 1), c=64), tree_case([], [300, 1], [300, 1], chunk_size=64))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases(),
    OPTIONS,
    st.sampled_from(DTYPES),
    st.sampled_from([(1, 1), (4, 4), (9, 3), (7, 1), (5, 5)]),
    st.sampled_from([32, 64, 72, 128]),
)
def test_random_trees(case: Case, options: PlanOptions, dtype: torch.dtype, heads: tuple[int, int], d: int):
    _check(_problem(dtype, heads, d), case, options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_memory_does_not_leak(dtype: torch.dtype):
    case = tree_case([(1, 2)], [5, 16, 33, 7], [1, 3], chunk_size=16)
    poisoned, clean = (
        attend(q, kv, case.plan())
        for _, kv, q in (_filled(_problem(dtype), case), _filled_over_zeros(_problem(dtype), case))
    )
    assert not poisoned.isnan().any()
    assert torch.equal(poisoned, clean)


def _filled_over_zeros(problem: AttentionProblem, case: Case) -> tuple[Backend, LayerKV, Tensor]:
    backend = select_backend(problem, "cpu")
    kv = backend.allocate(problem, case.num_slots)
    kv.k.zero_()
    kv.v.zero_()
    fill(backend, kv, case, poison=False)
    return backend, kv, random_q(case, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_slots(dtype: torch.dtype):
    options = PlanOptions(num_workers=4, min_split_tokens=16)
    before = _cpu.num_threads()
    results = []
    try:
        for threads, seed in [(1, 0), (2, 0), (5, 1), (2, 2)]:
            _cpu.set_num_threads(threads)
            case = tree_case([(1, 5), (3, 2)], [0, 5, 16, 33, 100, 7], [1, 1, 9], chunk_size=16, seed=seed)
            _, kv, q = _filled(_problem(dtype), case)
            results.append(attend(q, kv, case.plan(options)))
    finally:
        _cpu.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_mode_gives_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype):
    options = PlanOptions(fixed_split_tokens=32)
    case = tree_case([(1, 5), (2, 2)], [3, 16, 40, 1, 70, 5], [1, 1, 4], chunk_size=16)
    _, kv, q = _filled(_problem(dtype), case)
    together = attend(q, kv, case.plan(options))
    unshared = attend(q, kv, case.plan(dataclasses.replace(options, share=False)))
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
        assert torch.equal(attend(q[rows], kv, alone), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "c", "length"), [(64, 64, 151), (80, 16, 67), (40, 48, 98), (256, 64, 64)])
def test_bits_of_a_row_do_not_depend_on_how_many_are_computed_with_it(dtype: torch.dtype, d: int, c: int, length: int):
    """Few rows are multiplied by other instructions than many."""
    torch.manual_seed(length)
    case = tree_case([], [length], [60], chunk_size=c)
    _, kv, q = _filled(_problem(dtype, heads=(1, 1), d=d, c=c), case)
    q *= torch.logspace(-42, 1, 60)[:, None, None].to(dtype)  # denormals too
    whole = attend(q, kv, case.plan())
    for count in (1, 2, 3, 7, 8, 23, 24, 25):
        for end in (count, 31, 60):
            rows = slice(max(end - count, 0), end)
            plan = build_plan(
                paths=case.paths,
                kv_lens=[length - 60 + end],
                q_lens=[rows.stop - rows.start],
                kv_present=[0],
                chunk_size=c,
            )
            assert torch.equal(attend(q[rows], kv, plan), whole[rows]), f"rows {rows}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_growing_plan_decodes_like_fresh_ones(dtype: torch.dtype):
    problem = _problem(dtype)
    case = tree_case([(1, 2)], [9, 3], chunk_size=16)
    backend, kv, _ = _filled(problem, case)
    plan = case.plan()
    for step in range(6):
        plan.grow()
        k, v = (torch.randn(2, 2, 64).to(dtype) for _ in range(2))
        backend.append(kv, k, v, plan)
        lens = [n + step + 1 for n in case.kv_lens]
        q = random_q(case, problem, seed=step)
        want = oracle(q, kv, backend, paths=case.paths, kv_lens=lens, q_lens=[1, 1])
        assert worst_error(attend(q, kv, plan), want) <= TOLERANCE[dtype]


def _fp8(dtype: torch.dtype = torch.float32, **sizes: int) -> AttentionProblem:
    return dataclasses.replace(_problem(dtype, **sizes), kv_dtype=FP8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "c"), [(8, 16), (40, 48), (64, 64), (80, 96), (128, 256)])
def test_fp8_attends_to_what_it_holds(dtype: torch.dtype, d: int, c: int):
    _check(_fp8(dtype, d=d, c=c), tree_case([(1, 2), (2, 1)], [0, 5, c, 2 * c + 1], [1, 3], chunk_size=c))


def test_fp8_with_masks():
    problem = dataclasses.replace(_fp8(), window=20, softcap=3.0)
    _check(problem, tree_case([(1, 2)], [3, 17, 33], [1, 4], chunk_size=16), PlanOptions(num_workers=4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_append_rounds_and_scales_as_the_reference(dtype: torch.dtype):
    problem = _fp8(dtype, d=40, c=48)
    case = tree_case([(1, 1)], [5, 50], [5, 50], chunk_size=48)
    ours, reference = select_backend(problem, "cpu"), select_backend(problem, "reference")
    pools = [backend.allocate(problem, case.num_slots) for backend in (ours, reference)]
    k, v = (torch.randn(case.num_rows, 2, 40) * torch.logspace(-4, 4, case.num_rows)[:, None, None] for _ in range(2))
    k[0, 0] = 0.0
    for backend, pool in zip((ours, reference), pools, strict=True):
        fill(backend, pool, case)
        backend.append(pool, k.to(dtype), v.to(dtype), case.plan(kv_present=[0, 0]))
    for slot in set(np.concatenate(case.paths).tolist()):
        assert torch.equal(pools[0].k_scale[slot], pools[1].k_scale[slot])
        assert torch.equal(pools[0].v_scale[slot], pools[1].v_scale[slot])
        for a, b in zip(ours.read_chunk(pools[0], slot), reference.read_chunk(pools[1], slot), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_fp8_bits_do_not_depend_on_how_the_tokens_came():
    problem = _fp8(torch.bfloat16)
    path = np.array([2, 0, 3], np.int32)
    k, v = (torch.randn(40, 2, 64).bfloat16() for _ in range(2))
    pools = []
    for step in (40, 1, 7):
        backend = select_backend(problem, "cpu")
        kv = backend.allocate(problem, 4)
        for tiles in (kv.k, kv.v):
            tiles.view(torch.uint8).zero_()
        for begin in range(0, 40, step):
            end = min(begin + step, 40)
            plan = build_plan(paths=[path], kv_lens=[end], q_lens=[end - begin], kv_present=[begin], chunk_size=16)
            backend.append(kv, k[begin:end], v[begin:end], plan)
        pools.append(kv)
    for kv in pools[1:]:
        assert torch.equal(kv.k.view(torch.uint8)[path], pools[0].k.view(torch.uint8)[path])
        assert torch.equal(kv.v.view(torch.uint8)[path], pools[0].v.view(torch.uint8)[path])
        assert torch.equal(kv.k_scale[path], pools[0].k_scale[path])


def test_fp8_copies_scales_with_rows():
    problem = _fp8()
    case = tree_case([], [16], chunk_size=16)
    backend, kv, _ = _filled(problem, case)
    source = int(case.paths[0][0])
    target = next(slot for slot in range(case.num_slots) if slot != source)
    backend.copy_rows(kv, source, target, 9)
    for a, b in zip(backend.read_chunk(kv, source), backend.read_chunk(kv, target), strict=True):
        assert torch.equal(a[:9], b[:9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "c"), [(64, 16), (80, 96), (128, 256)])
def test_append_writes_what_read_chunk_reads_and_nothing_else(dtype: torch.dtype, d: int, c: int):
    problem = _problem(dtype, d=d, c=c)
    backend = select_backend(problem, "cpu")
    kv = backend.allocate(problem, 3)
    kv.k.zero_()
    kv.v.zero_()
    path = np.array([2, 0], np.int32)
    plan = build_plan(paths=[path], kv_lens=[c + 5], q_lens=[9], kv_present=[c - 2], chunk_size=c)
    # Strided rows, as a split of one projection gives them.
    both = torch.randn(9, 2, 2, d).to(dtype)
    backend.append(kv, both[:, 0], both[:, 1], plan)
    for side in (0, 1):
        first, second = backend.read_chunk(kv, 2)[side], backend.read_chunk(kv, 0)[side]
        assert torch.equal(first[-2:], both[2:4, side])
        assert torch.equal(second[:5], both[4:, side])
        assert not first[:-2].any()
        assert not second[5:].any()
        assert not backend.read_chunk(kv, 1)[side].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 80, 96])
def test_copy_rows_copies_so_many_and_no_more(dtype: torch.dtype, num_rows: int):
    problem = _problem(dtype, d=72, c=96)
    case = tree_case([], [96], chunk_size=96)
    backend, kv, _ = _filled(problem, case)
    source = int(case.paths[0][0])
    target = (source + 1) % kv.num_slots
    kv.k[target] = 0
    kv.v[target] = 0
    backend.copy_rows(kv, source, target, num_rows)
    for ours, theirs in zip(backend.read_chunk(kv, target), backend.read_chunk(kv, source), strict=True):
        assert torch.equal(ours[:num_rows], theirs[:num_rows])
        assert not ours[num_rows:].any()


@pytest.mark.parametrize("offset", [-1e5, 0.0, 1e4])
def test_extreme_logits(offset: float):
    """Every logit is huge, one key stands out by 5000: softmax picks it."""
    problem = _problem(heads=(1, 1), d=32)
    case = tree_case([(1, 2)], [20, 3], chunk_size=16)
    backend, kv, _ = _filled(problem, case)
    winner = 21  # of the first sequence; in the shared part for neither
    n = case.kv_lens[0]
    k = torch.zeros(n, 1, 32)
    k[:, 0, 0] = offset
    k[winner, 0, 0] = offset + 5000
    v = torch.randn(n, 1, 32)
    fresh = build_plan(paths=case.paths[:1], kv_lens=[n], q_lens=[n], kv_present=[0], chunk_size=16)
    backend.append(kv, k, v, fresh)
    q = torch.zeros(2, 1, 32)
    q[:, 0, 0] = 1.0
    out = attend(q, kv, case.plan(), scale=1.0)
    torch.testing.assert_close(out[0], v[winner])


def test_flat_attention_over_many_keys_is_the_mean():
    problem = _problem(torch.float16, heads=(1, 1), d=32, c=256)
    n = 20_000
    case = tree_case([], [n], chunk_size=256)
    backend, kv, _ = _filled(problem, case)
    v = (torch.randn(n, 1, 32) + 30).half()
    plan = build_plan(paths=case.paths, kv_lens=[n], q_lens=[n], kv_present=[0], chunk_size=256)
    backend.append(kv, torch.ones(n, 1, 32).half(), v, plan)
    out = attend(torch.ones(1, 1, 32).half(), kv, case.plan())
    torch.testing.assert_close(out.float()[0], v.double().mean(0).float(), rtol=1e-3, atol=0)


def test_fp32_queries_over_a_bf16_pool():
    problem = dataclasses.replace(_problem(), kv_dtype=torch.bfloat16)
    case = tree_case([(1, 3)], [5, 40], chunk_size=16)
    backend, kv, q = _filled(problem, case)
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
    dtype = torch.bfloat16 if rounds_to_bfloat16() else torch.float32
    assert worst_error(attend(q, kv, case.plan()), want) <= TOLERANCE[dtype]


def test_strided_queries():
    case = tree_case([(1, 3)], [5, 40], chunk_size=16)
    _, kv, q = _filled(_problem(), case)
    wide = torch.randn(2, 8, 100)
    wide[:, 1:7, 3:67] = q
    turned = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    want = attend(q, kv, case.plan())
    assert torch.equal(attend(wide[:, 1:7, 3:67], kv, case.plan()), want)
    assert torch.equal(attend(turned, kv, case.plan()), want)


def test_high_slots_are_addressed_in_64_bits():
    """A pool of more than 2^31 values, of which one chunk is touched."""
    problem = _problem(torch.float16, heads=(8, 8), d=256, c=256)
    num_slots = 2**31 // (8 * 256 * 256) + 2
    backend = select_backend(problem, "cpu")
    kv = backend.allocate(problem, num_slots)
    outs = []
    for slot in (1, num_slots - 1):
        path = [np.array([slot], np.int32)]
        plan = build_plan(paths=path, kv_lens=[9], q_lens=[9], kv_present=[0], chunk_size=256)
        torch.manual_seed(0)
        backend.append(kv, torch.randn(9, 8, 256).half(), torch.randn(9, 8, 256).half(), plan)
        outs.append(attend(torch.randn(9, 8, 256).half(), kv, plan))
    assert torch.equal(outs[0], outs[1])


def test_a_plan_for_a_larger_pool_is_refused():
    case = tree_case([], [40], chunk_size=16)
    _, kv, q = _filled(_problem(), case)
    plan = case.plan()
    broken = AttentionPlan.from_data(plan.data.copy())
    broken.chunk_slots[0] = 1000
    with pytest.raises(PlanError, match=r"names slots 0 to 1000, the pool has"):
        attend(q, kv, broken)
    broken = AttentionPlan.from_data(plan.data.copy())
    broken.item_q_end[0] = 9
    with pytest.raises(PlanError, match="item 0 of the plan leaves its arrays"):
        attend(q, kv, broken)
    with pytest.raises(BackendError, match="scale must be positive"):
        attend(q, kv, plan, scale=0.0)


def test_unknown_instruction_set_is_refused(isa: str):
    with pytest.raises(ValueError, match=r"instruction set 'mmx' is not one that this CPU can run: portable"):
        _cpu.set_isa("mmx")
    assert _cpu.isa() == isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(share=False), PlanOptions(fixed_split_tokens=32)])
@pytest.mark.parametrize(
    ("window", "softcap", "alibi", "sinks"),
    [
        (1, None, False, False),
        (7, None, False, True),
        (40, None, True, False),
        (1000, None, False, True),
        (None, 2.0, False, False),
        (None, None, True, False),
        (None, 5.0, True, True),
        (20, 0.5, True, True),
    ],
)
def test_masks_in_the_shared_phase(
    dtype: torch.dtype, options: PlanOptions, window: int | None, softcap: float | None, alibi: bool, sinks: bool
):
    """Window edges inside a shared node, with rows at different positions; chunks out of every window are NaN."""
    problem = dataclasses.replace(_problem(dtype), window=window, softcap=softcap)
    case = tree_case([(1, 3), (2, 1)], [0, 5, 16, 37], [1, 4, 20, 1], chunk_size=16)
    backend, kv, q = _filled(problem, case)
    extras = {
        "alibi_slopes": torch.linspace(0.5, 0.01, 6) if alibi else None,
        "sinks": torch.linspace(-1, 2, 6) if sinks else None,
    }
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens, **extras)
    if window is not None:
        _poison_chunks_out_of_every_window(kv, case, window)
    assert worst_error(attend(q, kv, case.plan(options), **extras), want) <= TOLERANCE[dtype]


def _poison_chunks_out_of_every_window(kv: LayerKV, case: Case, window: int) -> None:
    seen: set[int] = set()
    for path, kv_len, q_len in zip(case.paths, case.kv_lens, case.q_lens, strict=True):
        first = max(kv_len - q_len + 1 - window, 0)
        seen.update(path[first // case.chunk_size :].tolist())
    for slot in set(range(case.num_slots)) - seen:
        for tiles in (kv.k, kv.v):
            tiles[slot] = torch.nan
