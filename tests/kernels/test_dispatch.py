"""The backend table: choice, refusal, and what the checks at the entry say."""

import dataclasses
import logging

import pytest
import torch

from chunkserve.kernels.dispatch import (
    AttentionProblem,
    BackendError,
    attend,
    available_backends,
    backend_matrix,
    select_backend,
)
from chunkserve.kernels.plan import PlanError

from .attention_case import fill, random_q, tree_case

PROBLEM = AttentionProblem(
    device="cpu",
    dtype=torch.float32,
    kv_dtype=torch.float32,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    chunk_size=16,
)


def test_auto_takes_the_native_kernel_on_cpus():
    assert select_backend(PROBLEM).name == "cpu"


def test_auto_reaches_reference_last_and_warns(caplog: pytest.LogCaptureFixture):
    odd = dataclasses.replace(PROBLEM, head_dim=36)
    with caplog.at_level(logging.WARNING):
        assert select_backend(odd).name == "reference"
    assert "head_dim 36 is no multiple of 8" in caplog.text


def test_named_backend_never_falls_back():
    with pytest.raises(BackendError, match=r"backend cpu cannot serve .*chunk_size 24 is no multiple of 16"):
        select_backend(dataclasses.replace(PROBLEM, chunk_size=24), "cpu")


def test_unknown_name_lists_the_table():
    with pytest.raises(BackendError, match=r"no backend is called mps; there are .*reference"):
        select_backend(PROBLEM, "mps")


def test_no_backend_lists_every_reason():
    with pytest.raises(BackendError) as error:
        select_backend(dataclasses.replace(PROBLEM, dtype=torch.float64, kv_dtype=torch.float64))
    assert all(f"{name}: " in str(error.value) for name in available_backends())


def test_matrix_has_a_row_per_backend():
    matrix = dict(backend_matrix(PROBLEM))
    assert list(matrix) == available_backends()
    assert matrix["cpu"] is None
    assert matrix["reference"] is None


def test_choice_is_logged_once_per_problem(caplog: pytest.LogCaptureFixture):
    problem = dataclasses.replace(PROBLEM, num_heads=10)
    with caplog.at_level(logging.INFO, logger="chunkserve.kernels.dispatch"):
        select_backend(problem)
        select_backend(problem)
    assert caplog.text.count("backend=cpu") == 1


def test_heads_must_divide():
    with pytest.raises(BackendError, match="9 query heads are no multiple of 2 KV heads"):
        dataclasses.replace(PROBLEM, num_heads=9)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_entry_checks_name_both_sizes(name: str):
    case = tree_case([(1, 1)], [3, 5], chunk_size=16)
    backend = select_backend(PROBLEM, name)
    kv = backend.allocate(PROBLEM, case.num_slots)
    fill(backend, kv, case)
    plan, q = case.plan(), random_q(case, PROBLEM)
    other = tree_case([(1, 1)], [3, 5], chunk_size=32)
    with pytest.raises(PlanError, match="q has 1 rows, the plan has 2"):
        attend(q[:1], kv, plan)
    with pytest.raises(BackendError, match=r"q is \(2, 6, 16\), expected \[T, 6, 32\]"):
        attend(q[..., :16], kv, plan)
    with pytest.raises(BackendError, match=r"q is torch.float16 on cpu"):
        attend(q.half(), kv, plan)
    with pytest.raises(PlanError, match="the plan has chunks of 32 tokens, kv has 16"):
        attend(q, kv, other.plan())
    with pytest.raises(BackendError, match="allocated by backend"):
        attend(q, kv, plan, backend="triton")
    k = torch.zeros(2, 2, 32)
    with pytest.raises(BackendError, match=r"v is \(2, 3, 32\), expected \[T, 2, 32\]"):
        backend.append(kv, k, torch.zeros(2, 3, 32), plan)
    with pytest.raises(PlanError, match="k has 1 rows, the plan has 2"):
        backend.append(kv, k[:1], k[:1], plan)
    with pytest.raises(BackendError, match="slot 99 is not in a pool of"):
        backend.copy_rows(kv, 0, 99, 1)
