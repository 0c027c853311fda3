"""Logits to token ids. A token depends on its row, its seed and its position, never on who shares the batch."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .grammar import Grammar
from .token_counts import TokenCounts

# Nucleus sampling looks at so many of the most probable tokens first, and at all of them only where these fall short.
_FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """What is done to a row of logits before it is sampled; see SamplingParams.

    counts: of the tokens so far; None where there are no penalties.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    counts: TokenCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How one row of logits is sampled; see SamplingParams. `seed` and `position` give the random number."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    position: int
    logprobs: int | None = None
    adjustment: Adjustment | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A chosen token; `logprob` and `top` (token, log-probability; best first) where the row asked for them.

    token_id is None where the logits are not numbers.
    """

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a sequence's position: a counter-based generator, equal on every rank."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose a token per row.

    Args:
        logits: [R, V] float32.
        rows: R of them.
    """
    raw, logits = logits, _adjusted(logits, rows)
    best, ids = logits.max(dim=-1)
    chosen = ids.tolist()
    random = [i for i, row in enumerate(rows) if row.temperature > 0]
    if random:
        for i, token_id in zip(random, _draw(logits[random], [rows[i] for i in random]), strict=True):
            chosen[i] = token_id
    is_number = best.isfinite().tolist()
    out = [Sampled(token_id=token if ok else None) for token, ok in zip(chosen, is_number, strict=True)]
    for i, row in enumerate(rows):
        if row.logprobs is not None and out[i].token_id is not None:
            out[i] = _with_logprobs(raw[i], chosen[i], row.logprobs)
    return out


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits after bias, penalties and grammars of the rows that have any; the same tensor where none has."""
    adjusted = {i: row.adjustment for i, row in enumerate(rows) if row.adjustment is not None}
    restricted = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
    if not adjusted and not restricted:
        return logits
    logits = logits.clone()
    _add_bias(logits, adjusted)
    _penalise(logits, {i: one for i, one in adjusted.items() if one.counts is not None})
    _restrict(logits, restricted)
    return logits


def _add_bias(logits: Tensor, adjusted: Mapping[int, Adjustment]) -> None:
    """Change [R, V] in place, at one place per entry of logit_bias."""
    biases = [(i, token_id, bias) for i, one in adjusted.items() for token_id, bias in one.logit_bias]
    if biases:
        rows, token_ids, added = (torch.tensor(column, device=logits.device) for column in zip(*biases, strict=True))
        logits[rows, token_ids] += added


def _penalise(logits: Tensor, adjusted: Mapping[int, Adjustment]) -> None:
    """Change [R, V] in place, at N places: one per row and distinct token that it has had."""
    sizes = [one.counts.num_tokens for one in adjusted.values() if one.counts is not None]
    if not sum(sizes):
        return

    def spread(values: Iterable[float], dtype: type[np.generic]) -> Tensor:
        return _tensor(np.repeat(np.fromiter(values, dtype), sizes), logits)  # [N]

    counts = [one.counts for one in adjusted.values() if one.counts is not None]
    generated = _tensor(np.concatenate([one.generated for one in counts]), logits)  # [N]
    at = (spread(adjusted, np.int64), _tensor(np.concatenate([one.token_ids for one in counts]), logits))
    limits = torch.finfo(torch.float32)
    # Nearer to 0, float32 has no such number, and what it gives instead is no number.
    repetition = spread((max(one.repetition_penalty, limits.tiny) for one in adjusted.values()), np.float32)
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition).clamp(limits.min, limits.max)
    values -= spread((one.frequency_penalty for one in adjusted.values()), np.float32) * generated
    values -= spread((one.presence_penalty for one in adjusted.values()), np.float32) * (generated > 0)
    logits[at] = values


def _restrict(logits: Tensor, grammars: Mapping[int, Grammar]) -> None:
    """Change [R, V] in place: minus infinity for what may not come next."""
    if not grammars:
        return
    bits = np.zeros((len(grammars), -(-logits.shape[1] // 32)), np.int32)
    for row_bits, grammar in zip(bits, grammars.values(), strict=True):
        grammar.allow(row_bits)
    which = torch.tensor(list(grammars), device=logits.device)
    spread = torch.from_numpy(bits).to(logits.device)[:, :, None] >> torch.arange(32, device=logits.device)
    allowed = (spread & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[which] = logits[which].masked_fill(~allowed, -torch.inf)


def _tensor(values: "np.ndarray[tuple[int], np.dtype[np.generic]]", like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _with_logprobs(logits: Tensor, token_id: int, num_top: int) -> Sampled:
    logprobs = logits.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = logprobs.topk(min(num_top, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token_id=token_id, logprob=logprobs[token_id].item(), top=top)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    temperature = torch.tensor([row.temperature for row in rows], device=logits.device)
    # A temperature so low that the scaled logits overflow is greedy; shifted by the best, they stay finite.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature[:, None]
    probs = scaled.softmax(dim=-1)
    out = [0] * len(rows)
    plain = [i for i, row in enumerate(rows) if row.top_k == 0 and row.top_p >= 1.0]
    for i in plain:
        out[i] = _pick(_drop_unlikely(probs[i], rows[i].min_p), rows[i])
    filtered: dict[int, list[int]] = {}
    for i in set(range(len(rows))).difference(plain):
        # The row's own number: among equal probabilities, which come first depends on how many are asked for.
        filtered.setdefault(max(_FIRST_CANDIDATES, rows[i].top_k), []).append(i)
    for wanted, which in filtered.items():
        values, ids = probs[which].topk(min(wanted, probs.shape[-1]))
        for k, i in enumerate(which):
            candidates, tokens = values[k], ids[k]
            if not rows[i].top_k and candidates.sum() < rows[i].top_p:
                candidates, tokens = probs[i].sort(descending=True, stable=True)
            out[i] = int(tokens[_pick(_filter(candidates, rows[i]), rows[i])])
    return out


def _filter(probs: Tensor, row: SampleRow) -> Tensor:
    """Zero what top_k, then top_p, then min_p drop; probs are in descending order and the best one always stays."""
    if row.top_k:
        probs = probs[: row.top_k]
    total = probs.sum() if row.top_k else 1.0
    if row.top_p < 1.0:
        before = probs.cumsum(0) - probs
        probs = torch.where(before < row.top_p * total, probs, 0.0)
    return _drop_unlikely(probs, row.min_p)


def _drop_unlikely(probs: Tensor, min_p: float) -> Tensor:
    return torch.where(probs >= min_p * probs.max(), probs, 0.0) if min_p > 0 else probs


def _pick(probs: Tensor, row: SampleRow) -> int:
    """Inverse of the cumulated probabilities at the row's random number."""
    cumulated = probs.double().cumsum(0)
    at = torch.searchsorted(cumulated, uniform(row.seed, row.position) * cumulated[-1], right=True)
    return min(int(at), int(probs.nonzero()[-1]))
