"""Random models of two layers, with the small model's tokenizer."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS = {
    "smollm_like": {"num_attention_heads": 9, "num_key_value_heads": 3},
    "llama2_like": {"num_attention_heads": 32, "num_key_value_heads": 32},
    "llama3_like": {"num_attention_heads": 32, "num_key_value_heads": 8},
}
VOCAB_SIZE = 301


def save_random_llama(name: str, folder: Path, tokenizer_folder: Path) -> Path:
    """The folder, filled. The fifth-largest logit is far from the first."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16 * HEADS[name]["num_attention_heads"], intermediate_size=75,
        num_hidden_layers=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.4, **HEADS[name],
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for file in tokenizer_folder.glob("*token*"):
        (folder / file.name).symlink_to(file)
    return folder
