"""No rank reads the whole model: heads, MLP columns and vocabulary rows have one owner each."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chunkserve.replica import model
from chunkserve.replica.model import Decoder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_weight_but_norms_is_read_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, num_ranks: int
) -> None:
    config = LlamaConfig(
        vocab_size=1001, hidden_size=144, intermediate_size=75, num_hidden_layers=2, head_dim=16,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=tied,
    )  # fmt: skip
    whole = LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path)
    sizes: dict[str, list[int]] = {}
    read = model._Weights._read

    def counted(self: object, name: str, cut: object) -> torch.Tensor:
        part = read(self, name, cut)
        sizes.setdefault(name, []).append(part.numel())
        return part

    monkeypatch.setattr(model._Weights, "_read", counted)
    for rank in range(num_ranks):
        Decoder(tmp_path, dtype=torch.float32, max_tokens=64, rank=rank, num_ranks=num_ranks)
    for name, parameter in whole.named_parameters():
        own = sizes.pop(name)
        assert len(own) == num_ranks, name
        if not name.endswith("norm.weight"):
            assert sum(own) == parameter.numel(), name
            assert max(own) <= parameter.numel() * 2 / 3, name
    assert not sizes
