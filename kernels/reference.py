"""The float64 oracle, and the plan run in plain torch: slow, on any device, obviously right."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .dispatch import (
    FP8,
    AttentionProblem,
    Backend,
    LayerKV,
    check_append,
    check_attend,
    check_slot,
)
from .merge import Partial, empty_partial, merge
from .plan import AttentionPlan, Int32Array

# Largest absolute error against the oracle on data of unit scale, by dtype of q, K and V.
TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence in float64.

    Args:
        q: [n, H, D], the last n positions.
        k, v: [m, G, D], all positions.
        scale: factor of the logits.
        window, softcap: as in AttentionProblem.
        alibi_slopes, sinks: [H], as in `attend`.
    Returns:
        [n, H, D] float64.
    """
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(m, device=q.device) - torch.arange(m - n, m, device=q.device)[:, None]  # [n, m], <= 0 seen
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.double()[:, None, None] * distance
    hidden = distance > 0
    if window is not None:
        hidden |= distance <= -window
    logits = logits.masked_fill(hidden, -torch.inf)
    # A key out of the window may be gone from the pool, and must not be multiplied even by 0.
    values = values.masked_fill(hidden.all(0)[:, None, None], 0.0)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, n, 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :m]
    return torch.einsum("hnm,mhd->nhd", weights, values)


def oracle(
    q: Tensor,
    kv: LayerKV,
    backend: Backend,
    *,
    paths: Sequence[Int32Array],
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `attend` should give, from the arguments that its plan was built from; knows nothing of items.

    Args:
        q: [T, H, D].
        kv: filled tiles, read chunk by chunk through `backend`.
        paths, kv_lens, q_lens: as for `build_plan`.
        scale, alibi_slopes, sinks: as for `attend`.
    Returns:
        [T, H, D] float64.
    """
    p = kv.problem
    out = []
    for rows, path, kv_len in zip(q.split(list(q_lens)), paths, kv_lens, strict=True):
        chunks = [backend.read_chunk(kv, int(slot)) for slot in path[: -(-kv_len // p.chunk_size)]]
        k, v = (torch.cat([chunk[side] for chunk in chunks])[:kv_len] for side in (0, 1))
        out.append(
            dense_attention(
                rows,
                k,
                v,
                scale=p.head_dim**-0.5 if scale is None else scale,
                window=p.window,
                softcap=p.softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
            )
        )
    return torch.cat(out) if out else q.double()


def first_token_scale(new: Tensor) -> Tensor:
    """Scales of FP8 chunks (see LayerKV) from their first tokens, [N, G, D] -> [N, G] fp32."""
    top = new.float().abs().amax(dim=-1)
    exponent = torch.frexp(torch.where(top == 0, 1.0, top)).exponent - 2  # frexp's mantissas are in [0.5, 1)
    return torch.ldexp(torch.ones_like(top), exponent.clamp(-100, 100))


def read_plain_chunk(kv: LayerKV, slot: int) -> tuple[Tensor, Tensor]:
    """`Backend.read_chunk` where tiles are [S, G, C, D]."""
    k, v = kv.k[slot].transpose(0, 1).clone(), kv.v[slot].transpose(0, 1).clone()
    if kv.k_scale is not None and kv.v_scale is not None:
        return k.float() * kv.k_scale[slot, :, None], v.float() * kv.v_scale[slot, :, None]
    return k, v


class ReferenceBackend:
    """Runs the items one by one in torch. Tiles are [S, G, C, D]."""

    name = "reference"
    priority = 0

    def reject(self, problem: AttentionProblem) -> str | None:
        if problem.device not in ("cpu", "cuda"):
            return f"device {problem.device} is neither cpu nor cuda"
        if problem.device == "cuda" and not torch.cuda.is_available():
            return "torch finds no CUDA device"
        if problem.kv_dtype not in (*TOLERANCE, FP8) or problem.dtype not in TOLERANCE:
            return (
                f"dtypes {problem.dtype} and {problem.kv_dtype} are not among float32, float16, bfloat16, float8_e4m3fn"
            )
        return None

    def num_workers(self, problem: AttentionProblem) -> int:
        return 1

    def allocate(self, problem: AttentionProblem, num_slots: int) -> LayerKV:
        shape = (num_slots, problem.num_kv_heads, problem.chunk_size, problem.head_dim)
        k, v = (torch.empty(shape, dtype=problem.kv_dtype, device=problem.device) for _ in range(2))
        return LayerKV(
            k=k, v=v, problem=problem, num_slots=num_slots, backend=self.name, **problem.scale_tensors(num_slots)
        )

    def append(self, kv: LayerKV, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        check_append(k, v, kv, plan)
        slot, offset = (torch.from_numpy(x).long().to(k.device) for x in (plan.write_slot, plan.write_offset))
        rows = slot >= 0
        slot, offset = slot[rows], offset[rows]
        for tiles, scales, new in ((kv.k, kv.k_scale, k[rows]), (kv.v, kv.v_scale, v[rows])):
            if scales is not None:
                first = offset == 0
                scales[slot[first]] = first_token_scale(new[first])
                new = (new.float() / scales[slot][:, :, None]).clamp(-448.0, 448.0).to(FP8)
            tiles[slot, :, offset] = new.to(tiles.dtype)

    def copy_rows(self, kv: LayerKV, src_slot: int, dst_slot: int, num_rows: int) -> None:
        check_slot(kv, src_slot)
        check_slot(kv, dst_slot)
        for tiles in (kv.k, kv.v):
            tiles[dst_slot, :, :num_rows] = tiles[src_slot, :, :num_rows]
        kv.copy_scales(src_slot, dst_slot)

    def read_chunk(self, kv: LayerKV, slot: int) -> tuple[Tensor, Tensor]:
        check_slot(kv, slot)
        return read_plain_chunk(kv, slot)

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: AttentionPlan,
        *,
        scale: float,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_attend(q, kv, plan, alibi_slopes=alibi_slopes, sinks=sinks)
        row_pos = torch.from_numpy(plan.row_pos).to(q.device)
        parts: list[list[Partial]] = [[] for _ in range(plan.num_rows)]
        for item in plan.item_kv_begin.argsort(kind="stable").tolist():
            begin, end = int(plan.item_q_begin[item]), int(plan.item_q_end[item])
            slots = plan.slots_of(item)
            keys = torch.arange(int(plan.item_kv_len[item]), device=q.device) + int(plan.item_kv_begin[item])
            distance = keys - row_pos[begin:end, None]  # [R, kv_len]
            part = _attend_item(q[begin:end], kv, slots, distance, scale=scale, alibi_slopes=alibi_slopes)
            for row in range(begin, end):
                parts[row].append(Partial(out=part.out[row - begin], lse_ln=part.lse_ln[row - begin]))
        none = empty_partial((kv.problem.num_heads,), kv.problem.head_dim, q.device)
        merged = [merge(row_parts or [none]) for row_parts in parts]
        if sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)): the sink enters once, after the merge.
            merged = [Partial(out=m.out * torch.sigmoid(m.lse_ln - sinks)[:, None], lse_ln=m.lse_ln) for m in merged]
        return torch.stack([m.out for m in merged]).to(q.dtype) if merged else torch.empty_like(q)


def _attend_item(
    q: Tensor, kv: LayerKV, slots: Int32Array, distance: Tensor, *, scale: float, alibi_slopes: Tensor | None
) -> Partial:
    """Rows [R, H, D] against the keys of the chunks; `distance` [R, keys] is key position minus row position."""
    p = kv.problem
    index = torch.from_numpy(slots).long().to(q.device)
    num_keys = distance.shape[1]
    k, v = (
        (tiles[index].float() if scales is None else tiles[index].float() * scales[index][:, :, None, None])
        .transpose(0, 1)
        .flatten(1, 2)[:, :num_keys]
        for tiles, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
    )  # [G, keys, D]
    rows = q.float().unflatten(1, (p.num_kv_heads, p.group))  # [R, G, H / G, D]
    logits = torch.einsum("rghd,gkd->rghk", rows, k) * scale
    if p.softcap is not None:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.view(p.num_kv_heads, p.group, 1) * distance[:, None, None]
    hidden = distance > 0
    if p.window is not None:
        hidden = hidden | (distance <= -p.window)
    logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(torch.isneginf(lse), 0.0, lse)[..., None])
    # A key that no row sees may be gone from the pool, and must not be multiplied even by 0.
    out = torch.einsum("rghk,gkd->rghd", weights, v.masked_fill(hidden.all(0)[:, None], 0.0))
    return Partial(out=out.flatten(1, 2), lse_ln=lse.flatten(1, 2))
