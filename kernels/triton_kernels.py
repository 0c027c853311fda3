# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kernels of the Triton backend: segment, merge, append, grow. Python in syntax only.

Every kernel runs on a fixed grid and learns from device memory how much there is to do, so a CUDA graph captured once
stays valid; programs beyond the work do nothing. All of them read one int32 array (`staged`): a header that says where
the sections of the plan begin, then the plan as it is, then the tasks of each tile class (triton_plan.py writes it).

Logits are kept in base 2: a partial result is (O normalised, lse_log2), both fp32, identity (0, -inf).
Offsets into q, K, V, the output and the partials are 64-bit. Source: ChunkAttention section 3.2 (arXiv 2402.15220).
"""

import triton
import triton.language as tl

# Header fields of `staged`: counts, and where each section begins.
NUM_ROWS = tl.constexpr(0)
ROW_POS = tl.constexpr(1)
WRITE_SLOT = tl.constexpr(2)
WRITE_OFFSET = tl.constexpr(3)
ROW_PARTIAL_INDPTR = tl.constexpr(4)
ROW_PARTIALS = tl.constexpr(5)
ITEM_Q_BEGIN = tl.constexpr(6)
ITEM_Q_END = tl.constexpr(7)
ITEM_KV_BEGIN = tl.constexpr(8)
ITEM_KV_LEN = tl.constexpr(9)
ITEM_PARTIAL = tl.constexpr(10)
ITEM_CHUNK_INDPTR = tl.constexpr(11)
CHUNK_SLOTS = tl.constexpr(12)
TAIL_ITEMS = tl.constexpr(13)
TASKS = tl.constexpr(14)  # a count and a place for each tile class
HEADER_SIZE = tl.constexpr(20)
MAX_CLASSES = tl.constexpr(3)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def e4m3_to_f16(x):
    """e4m3 numbers, as bytes, to fp16; exact. Compute capability 8.0 has no instruction for it."""
    wide = x.to(tl.int16)
    # The exponent field moved into that of fp16 is the value divided by 256, denormals included.
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def f32_to_e4m3(x):
    """To the nearest e4m3 number, as a byte, to even on ties; what is larger than 448 becomes 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6 numbers are multiples of 2^-9; adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    wide = size.to(tl.int32, bitcast=True)
    large = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - 960
    return (tl.where(size < 0.015625, small, large) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def first_token_scale(x):
    """Scales of chunks from their first tokens, [R, D] fp32 -> [R]: what LayerKV says."""
    top = tl.max(tl.abs(x), 1)
    exponent = tl.where(top == 0.0, 127, top.to(tl.int32, bitcast=True) >> 23)
    return (tl.minimum(tl.maximum(exponent - 1, 27), 227) << 23).to(tl.float32, bitcast=True)


@triton.jit
def segment_kernel(
    q,  # [T, H, D]
    k,  # [S, G, C, D]; bytes with HAS_SCALES
    v,  # [S, G, C, D]
    k_scale,  # [S, G] fp32, or anything without HAS_SCALES
    v_scale,  # [S, G]
    out,  # [T, H, D], contiguous
    partial_out,  # [P, H, D] fp32
    partial_lse_log2,  # [P, H] fp32
    staged,
    alibi_slopes,  # [H] fp32, or anything without HAS_ALIBI
    sinks,  # [H] fp32, or anything without HAS_SINKS
    q_token_stride,
    q_head_stride,
    logit_scale,  # scale * log2(e); with a soft-cap 2 * log2(e) * scale / softcap
    softcap_log2,  # softcap * log2(e)
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_CLASS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SPLIT_MASK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attention of a tile of rows over the keys of one item, for one KV head; grid (programs,).

    A row is (query token, query head of the group). A task is (item, tile of its rows); KV heads vary fastest.
    SPLIT_MASK runs keys that every row sees in a loop of their own, without masks; worth it for many rows.
    """
    # The interpreter multiplies the bit patterns of bf16.
    UPCAST: tl.constexpr = INTERPRETED and q.dtype.element_ty == tl.bfloat16
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    num_tasks = tl.load(staged + TASKS + 2 * TILE_CLASS) * NUM_KV_HEADS
    tasks = staged + tl.load(staged + TASKS + 2 * TILE_CLASS + 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = offs_d < HEAD_DIM
    in_block = offs_n[:, None] * HEAD_DIM + offs_d[None, :]  # [N, D]
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        kv_head = task % NUM_KV_HEADS
        item = tl.load(tasks + task // NUM_KV_HEADS * 2)
        tile = tl.load(tasks + task // NUM_KV_HEADS * 2 + 1)
        # The places of the sections are read again for each task: kept, they would cost registers in the loop below.
        q_begin = tl.load(staged + tl.load(staged + ITEM_Q_BEGIN) + item)
        num_rows = (tl.load(staged + tl.load(staged + ITEM_Q_END) + item) - q_begin) * GROUP
        kv_begin = tl.load(staged + tl.load(staged + ITEM_KV_BEGIN) + item)
        kv_len = tl.load(staged + tl.load(staged + ITEM_KV_LEN) + item)
        partial = tl.load(staged + tl.load(staged + ITEM_PARTIAL) + item)
        slots = staged + tl.load(staged + CHUNK_SLOTS) + tl.load(staged + tl.load(staged + ITEM_CHUNK_INDPTR) + item)

        # Rows past the end repeat the last one and are not stored, so they cannot widen the range of keys.
        row = tile * BLOCK_M + offs_m  # [M]
        in_tile = row < num_rows
        row = tl.minimum(row, num_rows - 1)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        # Position of each row's own key, counted from the item's first key: the last one it sees.
        own_key = tl.load(staged + tl.load(staged + ROW_POS) + q_begin + token) - kv_begin  # [M]
        q_offset = (q_begin + token).to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        q_tile = tl.load(q + q_offset[:, None] + offs_d[None, :], mask=in_head[None, :], other=0.0)  # [M, D]
        if UPCAST:
            q_tile = q_tile.to(tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + head) * LOG2_E  # [M]

        # Keys [first, last) are seen by some row, [full_first, full_last) by all.
        last_key = tl.minimum(own_key, kv_len - 1)
        last = tl.max(last_key, 0) + 1
        full_last = tl.min(last_key, 0) + 1
        first = 0
        full_first = 0
        if HAS_WINDOW:
            first_key = own_key - window + 1
            first = tl.maximum(tl.min(first_key, 0), 0)
            full_first = tl.max(first_key, 0)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # Blocks before full_begin begin before a row's window, those before full_end are seen by all rows, the rest is
        # masked again. Always in this order, so that a row's sums do not depend on its neighbours.
        first_block = first // BLOCK_N
        last_block = tl.cdiv(last, BLOCK_N)
        full_begin = first_block
        full_end = first_block
        # The pipeline reads the slots of blocks past the end, though not their K and V.
        at_most = tl.maximum(last - 1, 0)
        if SPLIT_MASK:
            if HAS_WINDOW:
                full_begin = tl.minimum(tl.maximum(tl.cdiv(full_first, BLOCK_N), first_block), last_block)
            full_end = tl.minimum(tl.maximum(full_last // BLOCK_N, full_begin), last_block)
        for phase in tl.static_range(3):
            if phase == 0:
                phase_begin, phase_end = first_block, full_begin
            elif phase == 1:
                phase_begin, phase_end = full_begin, full_end
            else:
                phase_begin, phase_end = full_end, last_block
            if phase == 2 or (SPLIT_MASK and (phase == 1 or HAS_WINDOW)):
                for block in tl.range(phase_begin, phase_end, num_stages=STAGES):
                    begin = block * BLOCK_N
                    key = begin + offs_n  # [N]
                    if CHUNK % BLOCK_N == 0:
                        at_slot = slots + tl.minimum(begin, at_most) // CHUNK
                    else:
                        at_slot = slots + tl.minimum(key, at_most) // CHUNK  # [N]
                    # In assembly, hidden from the pipeliner: it would stage the slots, and K and V one step less.
                    if INTERPRETED:
                        slot = tl.load(at_slot).to(tl.int64)
                    else:
                        slot = tl.inline_asm_elementwise(
                            "ld.global.nc.s32 $0, [$1];", "=r,l", [at_slot], dtype=tl.int32, is_pure=True, pack=1
                        ).to(tl.int64)
                    if CHUNK % BLOCK_N == 0:
                        kv_offset = (slot * NUM_KV_HEADS + kv_head) * (CHUNK * HEAD_DIM) + begin % CHUNK * HEAD_DIM
                        k_block = k + kv_offset + in_block  # [N, D]
                        v_block = v + kv_offset + in_block
                    else:
                        kv_offset = ((slot * NUM_KV_HEADS + kv_head) * CHUNK + key % CHUNK) * HEAD_DIM  # [N]
                        k_block = k + kv_offset[:, None] + offs_d[None, :]
                        v_block = v + kv_offset[:, None] + offs_d[None, :]
                    # Keys that no row sees may hold NaN: K is masked in the logits, V here, because 0 * NaN is NaN.
                    wanted = in_head[None, :]
                    k_tile = tl.load(k_block, mask=wanted, other=0.0)
                    if phase != 1:
                        wanted = wanted & (key < last)[:, None]
                        if HAS_WINDOW:
                            wanted = wanted & (key >= first)[:, None]
                    v_tile = tl.load(v_block, mask=wanted, other=0.0)
                    if HAS_SCALES:
                        k_tile = e4m3_to_f16(k_tile)
                        v_tile = e4m3_to_f16(v_tile)
                        # One for the block, or one for each key: slot has that shape.
                        of_k = tl.load(k_scale + slot * NUM_KV_HEADS + kv_head)
                        of_v = tl.load(v_scale + slot * NUM_KV_HEADS + kv_head)
                    if UPCAST:
                        k_tile = k_tile.to(tl.float32)
                        v_tile = v_tile.to(tl.float32)
                    elif HAS_SCALES:
                        k_tile = k_tile.to(q.dtype.element_ty)
                        v_tile = v_tile.to(q.dtype.element_ty)
                    logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * logit_scale  # [M, N]
                    if HAS_SCALES:
                        logits = logits * of_k
                    if HAS_SOFTCAP:
                        # softcap * tanh(x), tanh by the exponential that the hardware has.
                        logits = softcap_log2 * (1.0 - 2.0 / (tl.exp2(logits) + 1.0))
                    if HAS_ALIBI:
                        logits += slope[:, None] * (key[None, :] - own_key[:, None]).to(tl.float32)
                    if phase != 1:
                        seen = key[None, :] <= last_key[:, None]
                        if HAS_WINDOW:
                            seen = seen & (key[None, :] >= first_key[:, None])
                        logits = tl.where(seen, logits, float("-inf"))
                    new_top = tl.maximum(top, tl.max(logits, 1))
                    # A row that has seen no key yet: -inf minus -inf is NaN.
                    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                    weight = tl.exp2(logits - shift[:, None])
                    decay = tl.exp2(top - shift)
                    total = total * decay + tl.sum(weight, 1)
                    if HAS_SCALES:
                        weight = weight * of_v
                    acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
                    top = new_top

        stored = in_tile[:, None] & in_head[None, :]
        if partial >= 0:
            total_or_one = tl.where(total > 0, total, 1.0)
            partial_row = (partial + token).to(tl.int64) * num_heads + head
            partial_tile = partial_out + partial_row[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(partial_tile, acc / total_or_one[:, None], mask=stored)
            lse_log2 = tl.where(total > 0, top + tl.log2(total_or_one), float("-inf"))
            tl.store(partial_lse_log2 + partial_row, lse_log2, mask=in_tile)
        else:
            if HAS_SINKS:
                sink = tl.load(sinks + head) * LOG2_E
                new_top = tl.maximum(top, sink)
                decay = tl.exp2(top - new_top)
                total = total * decay + tl.exp2(sink - new_top)
                acc = acc * decay[:, None]
            total = tl.where(total > 0, total, 1.0)
            out_row = (q_begin + token).to(tl.int64) * num_heads + head
            out_tile = out + out_row[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(out_tile, (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)


@triton.jit
def merge_kernel(
    partial_out,  # [P, H, D] fp32
    partial_lse_log2,  # [P, H] fp32
    out,  # [T, H, D], contiguous
    staged,
    sinks,  # [H] fp32, or anything without HAS_SINKS
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the partials of each row in plan order, whoever finished first; grid (programs,).

    Rows without partials were written by their item.
    """
    head_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    num_tasks = tl.load(staged + NUM_ROWS) * head_blocks
    row_partial_indptr = staged + tl.load(staged + ROW_PARTIAL_INDPTR)
    row_partials = staged + tl.load(staged + ROW_PARTIALS)
    offs_d = tl.arange(0, BLOCK_D)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        token = task // head_blocks
        head = task % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        in_row = head < NUM_HEADS
        stored = in_row[:, None] & (offs_d < HEAD_DIM)[None, :]
        begin = tl.load(row_partial_indptr + token)
        end = tl.load(row_partial_indptr + token + 1)
        if begin < end:
            if HAS_SINKS:
                top = tl.load(sinks + head, mask=in_row, other=0.0) * LOG2_E
                total = tl.full([BLOCK_H], 1.0, tl.float32)
            else:
                top = tl.full([BLOCK_H], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
            for i in range(begin, end):
                row = tl.load(row_partials + i).to(tl.int64) * NUM_HEADS + head
                lse = tl.load(partial_lse_log2 + row, mask=in_row, other=float("-inf"))
                part = tl.load(partial_out + row[:, None] * HEAD_DIM + offs_d[None, :], mask=stored, other=0.0)
                new_top = tl.maximum(top, lse)
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                decay = tl.exp2(top - shift)
                weight = tl.exp2(lse - shift)
                total = total * decay + weight
                acc = acc * decay[:, None] + part * weight[:, None]
                top = new_top
            total = tl.where(total > 0, total, 1.0)
            out_row = tl.full([BLOCK_H], token, tl.int64) * NUM_HEADS + head
            tl.store(
                out + out_row[:, None] * HEAD_DIM + offs_d[None, :],
                (acc / total[:, None]).to(out.dtype.element_ty),
                mask=stored,
            )


@triton.jit
def append_kernel(
    k,  # [T, G, D]
    v,  # [T, G, D]
    k_pool,  # [S, G, C, D]; bytes with HAS_SCALES
    v_pool,  # [S, G, C, D]
    k_scale,  # [S, G] fp32, or anything without HAS_SCALES
    v_scale,  # [S, G]
    staged,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Write each new token's K and V to its place in the pool; grid (programs,). A row is (token, KV head).

    Rows that come with their chunk's first token derive its scale from it, rather than wait for who stores it.
    """
    num_rows = tl.load(staged + NUM_ROWS) * NUM_KV_HEADS
    write_slot = staged + tl.load(staged + WRITE_SLOT)
    write_offset = staged + tl.load(staged + WRITE_OFFSET)
    offs_d = tl.arange(0, BLOCK_D)
    for begin in range(tl.program_id(0) * BLOCK_R, num_rows, tl.num_programs(0) * BLOCK_R):
        row = begin + tl.arange(0, BLOCK_R)
        token = row // NUM_KV_HEADS
        head = row % NUM_KV_HEADS
        slot = tl.load(write_slot + token, mask=row < num_rows, other=-1).to(tl.int64)
        written = slot >= 0
        offset = tl.load(write_offset + token, mask=written, other=0)
        to = (((slot * NUM_KV_HEADS + head) * CHUNK + offset) * HEAD_DIM)[:, None] + offs_d[None, :]
        valid = written[:, None] & (offs_d < HEAD_DIM)[None, :]
        token = token.to(tl.int64)
        k_from = (token * k_token_stride + head * k_head_stride)[:, None] + offs_d[None, :]
        v_from = (token * v_token_stride + head * v_head_stride)[:, None] + offs_d[None, :]
        k_new = tl.load(k + k_from, mask=valid, other=0.0)
        v_new = tl.load(v + v_from, mask=valid, other=0.0)
        if HAS_SCALES:
            first = token - offset
            is_here = written & (first >= 0)
            is_here = is_here & (tl.load(write_slot + first, mask=is_here, other=-1).to(tl.int64) == slot)
            is_here = is_here & (tl.load(write_offset + first, mask=is_here, other=-1) == 0)
            valid_first = is_here[:, None] & (offs_d < HEAD_DIM)[None, :]
            k_from = (first * k_token_stride + head * k_head_stride)[:, None] + offs_d[None, :]
            v_from = (first * v_token_stride + head * v_head_stride)[:, None] + offs_d[None, :]
            new_k = first_token_scale(tl.load(k + k_from, mask=valid_first, other=0.0).to(tl.float32))
            new_v = first_token_scale(tl.load(v + v_from, mask=valid_first, other=0.0).to(tl.float32))
            at = slot * NUM_KV_HEADS + head
            is_stored = written & (is_here == 0)
            of_k = tl.where(is_here, new_k, tl.load(k_scale + at, mask=is_stored, other=1.0))
            of_v = tl.where(is_here, new_v, tl.load(v_scale + at, mask=is_stored, other=1.0))
            tl.store(k_scale + at, new_k, mask=written & (offset == 0))
            tl.store(v_scale + at, new_v, mask=written & (offset == 0))
            k_new = f32_to_e4m3(k_new.to(tl.float32) / of_k[:, None])
            v_new = f32_to_e4m3(v_new.to(tl.float32) / of_v[:, None])
        tl.store(k_pool + to, k_new, mask=valid)
        tl.store(v_pool + to, v_new, mask=valid)


@triton.jit
def grow_kernel(staged, steps, BLOCK: tl.constexpr):
    """Move a staged plan on by `steps` decoded tokens per sequence, as AttentionPlan.grow does; grid (programs,)."""
    num_rows = tl.load(staged + NUM_ROWS)
    for begin in range(tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = begin + tl.arange(0, BLOCK)
        valid = row < num_rows
        row_pos = staged + tl.load(staged + ROW_POS) + row
        tl.store(row_pos, tl.load(row_pos, mask=valid) + steps, mask=valid)
        write_offset = staged + tl.load(staged + WRITE_OFFSET) + row
        tl.store(write_offset, tl.load(write_offset, mask=valid) + steps, mask=valid)
        tail = tl.load(staged + tl.load(staged + TAIL_ITEMS) + row, mask=valid, other=0)
        kv_len = staged + tl.load(staged + ITEM_KV_LEN) + tail
        tl.store(kv_len, tl.load(kv_len, mask=valid) + steps, mask=valid)
