"""A few cases on the host build of the CUDA kernels under ASan and UBSan; test_cuda_host.py runs this as a process."""

import sys
from pathlib import Path

import torch

from chunkserve.kernels.cuda_tpp import CudaBackend
from chunkserve.kernels.dispatch import FP8, AttentionProblem
from chunkserve.kernels.plan import PlanOptions
from chunkserve.kernels.reference import TOLERANCE, oracle

from .attention_case import fill, random_q, tree_case, worst_error
from .cuda_host_kernels import SANITIZERS, SM_80, SM_86, host_loader


def main(folder: Path, *, beyond_the_pool: bool) -> None:
    """Prints a line per case; with `beyond_the_pool` reads a slot that is not there."""
    half, single = torch.float16, torch.float32
    for dtype, kv_dtype, d, heads, window, limit in [
        (half, half, 80, (7, 1), None, SM_80),
        (half, half, 80, (4, 4), 19, SM_80),
        (half, FP8, 80, (4, 4), 19, SM_80),
        (single, single, 64, (3, 1), 40, SM_86),
    ]:
        problem = AttentionProblem(
            device="cpu",
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=d,
            chunk_size=16,
            window=window,
        )
        backend = CudaBackend(load=host_loader(folder, shared_limit=limit, flags=SANITIZERS))
        case = tree_case([(1, 3), (2, 1)], [0, 9, 40, 17], [1, 3, 20], chunk_size=16)
        kv = backend.allocate(problem, case.num_slots)
        fill(backend, kv, case)
        none = torch.zeros(case.num_rows, heads[1], d, dtype=dtype)
        backend.append(kv, none, none, case.plan(kv_present=case.kv_lens))  # writes nothing: all slots are -1
        q = random_q(case, problem)
        plan = case.plan(PlanOptions(num_workers=4, min_split_tokens=16))
        if beyond_the_pool:
            plan.chunk_slots[-1] = case.num_slots
        out = backend.attend(q, kv, plan, scale=d**-0.5)
        want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
        error = worst_error(out, want)
        print(problem, "right" if error <= TOLERANCE[dtype] else f"wrong by {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), beyond_the_pool="beyond-the-pool" in sys.argv[2:])
