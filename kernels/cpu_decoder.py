"""The layers of a Llama-like decoder on CPUs as one native call per step.

It computes what the pieces of cpu_ops.py and cpu_tpp.py compute, in their order and with their bits; at one row the
calls, the small tensors and the cold interpreter between the pieces would take a quarter of a step
(benchmarks/ours_step_profile.py, with --pieces and without).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _cpu
from .cpu_ops import PackedLinear
from .cpu_tpp import CpuBackend, native_pool
from .dispatch import BackendError, LayerKV
from .plan import AttentionPlan, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; norms are float32.

    qkv: [(H + 2G) D, hidden]; q_norm, k_norm: [D] each, where each head of q and k is normalised before it is rotated.
    output: [hidden, H D]; mlp_norm: [hidden], of what the MLP takes.
    gate_up: [2 M, hidden], gate first; down: [hidden, M].
    next_norm: [hidden], of what the layer gives: that with which the next layer begins, or the final one.
    """

    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    next_norm: Tensor


class DecoderLayers:
    """All layers over one pool; one thread at a time may run them.

    Args:
        layers: by depth.
        kv: of each layer, allocated by the `cpu` backend, for queries of float32.
        eps: of all norms.
        scale: of logits.
    Raises:
        BackendError: a pool is another backend's, or takes queries of another type.
        ValueError: a weight has another size; names both.
    """

    def __init__(self, layers: Sequence[LayerWeights], kv: Sequence[LayerKV], *, eps: float, scale: float) -> None:
        p = kv[0].problem
        self._chunk_size = p.chunk_size
        # The native side holds addresses.
        self._kept = (tuple(layers), tuple(kv))
        self._native = _cpu.DecoderLayers(
            hidden=layers[0].qkv.in_features,
            intermediate=layers[0].down.in_features,
            num_heads=p.num_heads,
            num_kv_heads=p.num_kv_heads,
            head_dim=p.head_dim,
            eps=eps,
        )
        for layer, layer_kv in zip(layers, kv, strict=True):
            problem = layer_kv.problem
            if layer_kv.backend != CpuBackend.name or problem.dtype != torch.float32:
                raise BackendError(
                    f"a pool of backend {layer_kv.backend} for queries of {problem.dtype}; these layers take pools of "
                    f"backend {CpuBackend.name} for torch.float32"
                )
            self._native.add(
                qkv=layer.qkv.weight,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                output=layer.output.weight,
                mlp_norm=layer.mlp_norm,
                gate_up=layer.gate_up.weight,
                down=layer.down.weight,
                next_norm=layer.next_norm,
                **native_pool(layer_kv),
                scale=scale,
                window=problem.window or 0,
                softcap=problem.softcap or 0.0,
            )

    def __call__(self, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> None:
        """One step, in place.

        Args:
            x: [T, hidden] float32, rows in plan order; the residual stream before and after.
            h: [T, hidden] float32, x normalised for the first layer; then by the last `next_norm`.
            cos, sin: [T, D / 2] float32, of each row's position.
        Raises:
            PlanError: the plan has other rows or chunks.
        """
        if plan.chunk_size != self._chunk_size:
            raise PlanError(f"the plan has chunks of {plan.chunk_size} tokens, kv has {self._chunk_size} (chunk_size)")
        try:
            self._native.run(x, h, cos, sin, plan.data)
        except ValueError as error:
            raise PlanError(str(error)) from error
