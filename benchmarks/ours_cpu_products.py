"""How fast are the decoder's products on this CPU? Ours with packed weights, as they are and as int8, against torch and
oneDNN.

One step is every product of SmolLM2-135M: 30 layers and the LM head. The floor of a step is the time to read the
weights, as the system keeps them, once at this machine's bandwidth, or to multiply at its peak, whichever is longer.
Floor and systems are measured by turns, so that a busy machine slows them alike. The best of each counts; `spread` is
median over best.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chunkserve.kernels import _cpu
from chunkserve.kernels.cpu_ops import PackedLinear, set_num_threads
from rows import write_rows

LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE = (49152, 576)
PEERS = ("torch", "onednn_packed")
Product = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class System:
    name: str
    products: list[Product]
    weight_bytes: int
    seconds: list[float] = field(default_factory=list)

    def step(self, inputs: list[Tensor]) -> None:
        begin = time.perf_counter()
        for product, x in zip(self.products, inputs, strict=True):
            product(x)
        self.seconds.append(time.perf_counter() - begin)


def onednn_packed(weight: Tensor, batch: int) -> Product:
    """oneDNN with weights packed for one batch size, through torch's private operators."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, batch)

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    product(torch.zeros(batch, weight.shape[1], dtype=weight.dtype))
    return product


def build_systems(weights: list[Tensor], batch: int) -> list[System]:
    num_weights = sum(w.numel() for w in weights)
    num_bytes = sum(w.nbytes for w in weights)
    systems = [
        System("ours", [PackedLinear.pack(w) for w in weights], num_bytes),
        System("ours_int8", [PackedLinear.pack(w, dtype=torch.int8) for w in weights], num_weights),
        System("torch", [lambda x, w=w: F.linear(x, w) for w in weights], num_bytes),  # type: ignore[misc]
    ]
    try:
        systems.append(System("onednn_packed", [onednn_packed(w, batch) for w in weights], num_bytes))
    except (AttributeError, RuntimeError) as error:
        print(f"onednn_packed left out: {str(error).splitlines()[0][:80]}")
    return systems


def check(systems: list[System], weights: list[Tensor], inputs: list[Tensor]) -> None:
    """Refuses to time a wrong product."""
    for i in range(len(LAYER_SHAPES)):
        x, w = inputs[i].double(), weights[i].double()
        scale = (x.abs() @ w.abs().T).max()
        for system in systems:
            error = (system.products[i](inputs[i]).double() - x @ w.T).abs().max() / scale
            is_exact = inputs[i].dtype == torch.float32 and system.name != "ours_int8"
            limit = 1e-6 if is_exact else 2**-8
            if not error <= limit:
                raise SystemExit(f"{system.name} is wrong: error {error:.3g} over {limit:.3g} for {list(w.shape)}")


def measure(dtype: torch.dtype, batch: int, num_layers: int, budget_s: float) -> list[dict[str, Any]]:
    rng = torch.Generator().manual_seed(0)
    shapes = [shape for _ in range(num_layers) for shape in LAYER_SHAPES] + [HEAD_SHAPE]
    weights = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
    inputs = [torch.randn(batch, k, generator=rng).to(dtype) for _, k in shapes]
    systems = build_systems(weights, batch)
    check(systems, weights, inputs)
    buffer = torch.ones(64 << 20)
    _cpu.advise_large_pages(buffer.data_ptr(), buffer.nbytes)
    bandwidth: list[float] = []
    peak: list[float] = []
    for system in systems:
        system.step(inputs)  # warm-up
        system.seconds.clear()
    begin = time.perf_counter()
    while not bandwidth or time.perf_counter() - begin < budget_s:
        bandwidth.append(_cpu.probe_read_gb_per_s(buffer))
        peak.append(_cpu.probe_multiply_gflop_per_s(dtype == torch.bfloat16))
        for system in systems:
            system.step(inputs)
    gflop = 2 * batch * sum(w.numel() for w in weights) * 1e-9
    rows = []
    for system in systems:
        weight_gb = system.weight_bytes * 1e-9
        floor_s = max(weight_gb / max(bandwidth), gflop / max(peak))
        best = min(system.seconds)
        rows.append(
            {
                "system": system.name,
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "layers": num_layers,
                "step_ms": best * 1e3,
                "spread": statistics.median(system.seconds) / best,
                "repeats": len(system.seconds),
                "warmup": 1,
                "weights_gb_per_s": weight_gb / best,
                "gflop_per_s": gflop / best,
                "floor_ms": floor_s * 1e3,
                "floor_share": floor_s / best,
                "machine_gb_per_s": max(bandwidth),
                "machine_gflop_per_s": max(peak),
                "isa": _cpu.isa(),
                "threads": _cpu.num_threads(),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 layers, a second each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--threads", type=int, default=0, help="threads of every system; 0 means all CPUs")
    parser.add_argument("--isa", choices=_cpu.supported_isas(), help="another level than the best of this CPU")
    args = parser.parse_args()
    if args.isa:
        _cpu.set_isa(args.isa)
    torch.set_num_threads(set_num_threads(args.threads))
    rows: list[dict[str, Any]] = []
    print(f"isa={_cpu.isa()} threads={_cpu.num_threads()}")
    print("dtype     batch  system          step ms   GB/s  GFLOP/s  of floor  spread")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for batch in (1, 8, 32, 256):
                for row in measure(dtype, batch, 6 if args.quick else 30, 1.0 if args.quick else 5.0):
                    rows.append(row)
                    print(
                        f"{row['dtype']:<9} {batch:>5}  {row['system']:<14} {row['step_ms']:>8.2f} "
                        f"{row['weights_gb_per_s']:>6.1f} {row['gflop_per_s']:>8.1f} {row['floor_share']:>8.0%} "
                        f"{row['spread']:>7.2f}",
                        flush=True,
                    )
    if args.json:
        write_rows(args.json, rows)
    step_ms = {(row["system"], row["dtype"], row["batch"]): row["step_ms"] for row in rows}
    ratios = []
    for batch in (1, 32):
        peer = min(ms for (system, _, b), ms in step_ms.items() if system in PEERS and b == batch)
        ours, int8 = (step_ms[system, "bfloat16", batch] for system in ("ours", "ours_int8"))
        ratios.append(f"{peer / ours:.1f}x at batch {batch} (with int8 weights {ours / int8:.2f}x of that)")
    print(f"ours in bfloat16 over the fastest peer in any dtype: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
