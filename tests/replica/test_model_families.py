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
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from chunkserve.kernels.dispatch import BackendError
from chunkserve.replica.build import build_engine, check_options
from chunkserve.replica.engine import Engine
from chunkserve.replica.model import Decoder
from chunkserve.replica.model_config import ModelError
from chunkserve.replica.model_runner import Model
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent
from chunkserve.replica.transformers_model import TransformersModel

from .rank_threads import model_ranks

VOCAB, CHUNK, WINDOW, NUM_TOKENS = 301, 16, 21, 10
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 75, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LAST_LAYERS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
INTERLEAVED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": False, **INTERLEAVED}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}

# Configuration class, and what is said beside SIZES.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"head_dim": 24, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", LAST_LAYERS),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True, **LAST_LAYERS}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, **GEMMA}),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 256}),
    "olmo2": ("Olmo2Config", {}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "phi3_partial": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "llama_gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, **EXPERTS, **INTERLEAVED}),
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


def greedy(folder: Path) -> dict[str, tuple[int, ...]]:
    """transformers' own words."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    out = {}
    for name, prompt in prompts().items():
        ids = torch.tensor([prompt])
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )  # fmt: skip
        out[name] = tuple(tokens[0, len(prompt) :].tolist())
    assert len({word for words in out.values() for word in words}) > 15, "a model that repeats itself proves little"
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

    @property
    def model(self) -> Model:
        return self.engine._core._runner.model

    def _take(self, events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def words(self) -> dict[str, tuple[int, ...]]:
        """Of all prompts, computed in pieces while others decode."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
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
    assert type(replica.model) is (Decoder if name in SHARED else TransformersModel)
    assert replica.words() == greedy(folder)
    assert replica.engine.load().cached_prompt_tokens > 45


@pytest.mark.parametrize(("name", "num_ranks"), [("mistral", 2), ("qwen2", 2), ("qwen3", 2), ("phi3", 2), ("phi3", 3)])
def test_words_of_ranks_are_those_of_transformers(tmp_path: Path, name: str, num_ranks: int) -> None:
    folder = save(tmp_path, *SHARED[name])
    ranks = model_ranks(options(folder), num_ranks)
    try:
        for request, prompt in prompts().items():
            ranks.submit(request, prompt, NUM_TOKENS)
            ranks.turn()
        ranks.run()
        assert {request: ranks.tokens(request) for request in prompts()} == greedy(folder)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mistral", "sliding_window", None),
        ("gemma2", "sliding_window", 200),
        ("gemma2", "attn_logit_softcapping", None),
    ],
)
def test_windows_and_soft_caps_change_these_words(tmp_path: Path, name: str, field: str, value: object) -> None:
    """Else the tests above would prove nothing about them."""
    folder = save(tmp_path, *(SHARED | OTHERS)[name])
    words = Replica(folder).words()
    config = json.loads((folder / "config.json").read_text())
    assert config[field]
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    assert Replica(folder).words() != words


def test_bfloat16_is_near(tmp_path: Path) -> None:
    """The model's check of itself compares the logits with transformers' own."""
    folder = save(tmp_path, *OTHERS["gemma2"])
    replica = Replica(folder, dtype="bfloat16")
    assert replica.model.activation_dtype == torch.bfloat16
    assert all(len(words) == NUM_TOKENS for words in replica.words().values())


@pytest.mark.parametrize(
    ("module", "forward"),
    [
        (LlamaMLP, lambda plain: lambda self, x: plain(self, x + x.roll(1, dims=1))),
        (
            LlamaRotaryEmbedding,
            lambda plain: lambda self, x, position_ids: plain(self, x, torch.arange(x.shape[1])[None]),
        ),
    ],
    ids=["mixes tokens outside of attention", "counts positions by rows"],
)
def test_a_model_that_is_not_what_it_seems_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, forward: Any
) -> None:
    folder = save(tmp_path, *OTHERS["llama_gelu"])
    Replica(folder)
    monkeypatch.setattr(module, "forward", forward(module.forward))
    with pytest.raises(ModelError, match=r"differ from transformers' own by \d+\.\d%: it keeps more of earlier tokens"):
        Replica(folder)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, *OTHERS["gpt_neox"])
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if "layers.2" in name and name.endswith("query_key_value.bias")]
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no tensor gpt_neox\.layers\.2\.attention\.query_key_value\.bias"):
        Replica(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        Replica(folder)


EXACT_MLA = {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
             "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
             "moe_intermediate_size": 32}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("kind", "said", "changed", "message"),
    [
        ("T5Config", {}, {}, "model_type is t5, an encoder with a decoder"),
        ("ViTConfig", {}, {}, "model_type is vit, which transformers has no causal language model for"),
        ("LlamaConfig", {}, {"model_type": "own", "auto_map": {"AutoConfig": "x.C"}}, "model_type is own, with code"),
        ("LlamaConfig", {}, {"model_type": "own"}, r"model_type is own, which transformers [\d.]+ does not know"),
        ("LlamaConfig", {}, {"num_hidden_layers": "four"}, "transformers cannot read .*num_hidden_layers"),
        ("LlamaConfig", {}, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is gptq"),
        ("Phi3Config", {"rope_parameters": LONGROPE}, {}, "rope_type is longrope, which turns cached keys anew"),
        ("MambaConfig", {}, {}, r"model_type is mamba with layers of linear_attention \(layer_types\)"),
        ("Llama4TextConfig", {}, {}, r"model_type is llama4_text with layers of chunked_attention \(layer_types\)"),
        ("Gemma3Config", {}, {}, r"model_type is gemma3, which is more than a text model \(text_config\)"),
        ("Gemma4TextConfig", {"head_dim": 32, "global_head_dim": 64}, {}, "4/2/32, 4/2/64; served is one size"),
        ("DeepseekV3Config", EXACT_MLA, {}, "queries and keys have 24 dimensions and 4 heads, values 16 and 4"),
        ("BertConfig", {}, {}, r"attention is not causal \(is_causal\)"),
        ("BloomConfig", {}, {}, "model_type is bloom, whose forward takes no position_ids"),
        ("FalconConfig", {}, {}, "model_type is falcon, which does not run through transformers' attention interface"),
        ("XGLMConfig", {"num_layers": 4, "attention_heads": 4}, {}, "model_type is xglm: 0 of its 4 layers"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    tmp_path: Path, kind: str, said: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    sizes = {} if kind in ("T5Config", "ViTConfig", "MambaConfig", "Gemma3Config") else SIZES
    getattr(transformers, kind)(**{**sizes, **said}).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | changed))
    with pytest.raises(ModelError, match=message):
        check_options(options(tmp_path))


def test_knobs_that_a_model_cannot_follow_are_refused(tmp_path: Path) -> None:
    transformers.Gemma2Config(**SIZES, head_dim=12).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"tensor_parallel_size is 2; .* model_type is gemma2; the decoder knows: llama, mistral, phi3"
    ):
        check_options(options(tmp_path, num_ranks=2))
    with pytest.raises(BackendError, match="head_dim 12 is no multiple of 8 up to 256"):
        check_options(options(tmp_path, attention_backend="cpu"))
