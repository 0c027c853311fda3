"""Tiny random models of many families, through the engine, against transformers' own greedy words in float32.

Windows are shorter than the prompts, and prompts share a prefix that is longer than a chunk.
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from chunkserve.replica.build import build_engine, check_options
from chunkserve.replica.engine import Engine
from chunkserve.replica.model import Decoder
from chunkserve.replica.model_config import ModelError
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent
from chunkserve.replica.transformers_model import TransformersModel

from .rank_threads import model_ranks

VOCAB, CHUNK, WINDOW = 301, 16, 21
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 75, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LAST_LAYERS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
INTERLEAVED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Configuration class, and what is said beside SIZES.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"head_dim": 24, "sliding_window": WINDOW}),
    "mistral_without_window": ("MistralConfig", {"head_dim": 24, "sliding_window": None}),
    "qwen2": ("Qwen2Config", LAST_LAYERS),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True, **LAST_LAYERS}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0,
                                "attn_logit_softcapping": 5.0, **INTERLEAVED}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 24, **INTERLEAVED}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 256}),
    "olmo2": ("Olmo2Config", {}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "phi3_partial": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "llama_gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "opt": ("OPTConfig", {"ffn_dim": 75, "word_embed_proj_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, **EXPERTS}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, **INTERLEAVED}),
}  # fmt: skip


def save(folder: Path, kind: str, options: dict[str, Any]) -> Path:
    """A random model with biases, norms and sinks that are not what they begin as, and a tokenizer of bytes."""
    config = getattr(transformers, kind)(**{**SIZES, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


def prompts() -> dict[str, tuple[int, ...]]:
    """Some share 45 tokens, some 20, some nothing."""
    rng = random.Random(5)
    words = [rng.randrange(1, VOCAB) for _ in range(200)]
    stem = tuple(words[:45])
    return {
        "stem": stem,
        "stem and a tail": (*stem, *words[50:63]),
        "stem and another tail": (*stem, *words[70:71]),
        "begin of the stem": (*stem[:20], *words[80:95]),
        "alone": tuple(words[100:130]),
        "short": tuple(words[140:143]),
    }


def greedy(folder: Path, num_tokens: int) -> dict[str, tuple[int, ...]]:
    """transformers' own words."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    out = {}
    for name, prompt in prompts().items():
        ids = torch.tensor([prompt])
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )  # fmt: skip
        out[name] = tuple(tokens[0, len(prompt) :].tolist())
    return out


def options(folder: Path, **changed: Any) -> ReplicaOptions:
    sizes = {"dtype": "float32", "chunk_size": CHUNK, "num_threads": 1, "pool_chunks": 80, "max_running": 4,
             "max_step_tokens": 40, "max_sequence_tokens": 128}  # fmt: skip
    return ReplicaOptions(model=str(folder), **{**sizes, **changed})


class Replica:
    """A real engine, stepped by hand."""

    def __init__(self, folder: Path, **changed: Any) -> None:
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.engine: Engine = build_engine(options(folder, **changed), self._take)

    def _take(self, events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def words(self, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """Of all prompts, computed in pieces while others decode."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for name, prompt in prompts().items():
            self.engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=params))
            self.engine._take_messages(wait=False)
            self.engine.step()
        while self.engine.step():
            pass
        self.engine.check()
        return {name: tuple(t for event in self.events[name] for t in event.token_ids) for name in prompts()}


@pytest.mark.parametrize("name", [*SHARED, *OTHERS])
def test_words_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, *(SHARED | OTHERS)[name])
    replica = Replica(folder)
    assert type(replica.engine._core._runner.model) is (Decoder if name in SHARED else TransformersModel)
    assert replica.words(12) == greedy(folder, 12)
    assert replica.engine.load().cached_prompt_tokens > 0
