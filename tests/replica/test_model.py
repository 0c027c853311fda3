"""The decoder against transformers on small random models: biases, rotary kinds, ranks that share the work."""

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, LlamaForCausalLM

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.control_rows import ControlRows
from chunkserve.cluster.rank_group import RankGroup
from chunkserve.kernels.dispatch import select_backend
from chunkserve.kernels.plan import build_plan
from chunkserve.replica.decoder_ops import CpuOps, TorchOps
from chunkserve.replica.kv_store import KVStore
from chunkserve.replica.model import Decoder, DecoderConfig
from chunkserve.replica.model_config import ModelError

from ..cluster.rank_threads import on_ranks  # noqa: TID252
from ..kernels.int8_weights import int8_values  # noqa: TID252

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "smollm_like": {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "llama2_like": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "biases": {"num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "llama3_like": {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
}


def save(folder: Path, **options: object) -> LlamaForCausalLM:
    heads = options["num_attention_heads"]
    assert isinstance(heads, int)
    config = LlamaConfig(
        vocab_size=101, hidden_size=16 * heads, intermediate_size=75, num_hidden_layers=3, head_dim=16,
        max_position_embeddings=256, initializer_range=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def store(model: Decoder, num_slots: int = 8) -> KVStore:
    problems = model.problems(16)
    return KVStore(select_backend(problems[0]), problems, num_slots=num_slots)


def logits_in_two_steps(model: Decoder, token_ids: list[int], split: int) -> torch.Tensor:
    """Logits of every row: the first tokens in one step, the rest over their cached keys in another."""
    kv = store(model)
    slots = torch.arange(7, 0, -1, dtype=torch.int32).numpy()
    out = []
    with torch.inference_mode():
        for begin, end in ((0, split), (split, len(token_ids))):
            plan = build_plan(
                paths=[slots], kv_lens=[end], q_lens=[end - begin], kv_present=[begin], chunk_size=16
            )  # fmt: skip
            ids, positions = torch.tensor(token_ids[begin:end]), torch.arange(begin, end)
            out.append(model.forward(ids, positions, plan, kv, torch.arange(end - begin)))
    return torch.cat(out)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    reference = save(tmp_path, **CONFIGS[name])
    token_ids = torch.randint(101, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    want = reference(torch.tensor([token_ids])).logits[0]
    model = Decoder(tmp_path, dtype=torch.float32, max_tokens=128)
    torch.testing.assert_close(logits_in_two_steps(model, token_ids, 37), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_in_one_call_have_the_bits_of_their_pieces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
) -> None:
    save(tmp_path, **CONFIGS[name])
    model = Decoder(tmp_path, dtype=dtype, weight_dtype=weight_dtype, max_tokens=128)
    token_ids = torch.randint(101, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    kv = store(model)
    assert model._native_layers(kv) is model._native_layers(kv) is not None
    together = logits_in_two_steps(model, token_ids, 69)
    monkeypatch.setattr(model, "_native_layers", lambda kv: None)
    assert torch.equal(together, logits_in_two_steps(model, token_ids, 69))


@pytest.mark.parametrize("name", ["biases", "llama3_like"])
def test_int8_weights_are_a_model_of_rounded_weights(tmp_path: Path, name: str) -> None:
    reference = save(tmp_path, **CONFIGS[name])
    token_ids = torch.randint(101, (70,), generator=torch.Generator().manual_seed(6)).tolist()
    stored = reference(torch.tensor([token_ids])).logits[0]
    with torch.no_grad():
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(int8_values(module.weight))
    want = reference(torch.tensor([token_ids])).logits[0]
    model = Decoder(tmp_path, dtype=torch.float32, weight_dtype=torch.int8, max_tokens=128)
    torch.testing.assert_close(logits_in_two_steps(model, token_ids, 37), want, atol=1e-3, rtol=1e-4)
    assert (want - stored).abs().max() > 0.1, "rounding shows"


def test_ranks_round_their_own_weights_and_agree(tmp_path: Path) -> None:
    reference = save(tmp_path, **CONFIGS["llama3_like"])
    token_ids = torch.randint(101, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    want = reference(torch.tensor([token_ids])).logits[0]

    alone = logits_in_two_steps(Decoder(tmp_path, weight_dtype=torch.int8, max_tokens=64), token_ids, 20)

    def run(group: RankGroup) -> torch.Tensor:
        model = Decoder(tmp_path, weight_dtype=torch.int8, max_tokens=64, rank=group.rank, num_ranks=2)
        model.collectives = Collectives(group, max_rows=40, hidden_size=model.config.hidden_size)
        return logits_in_two_steps(model, token_ids, 20)

    results = on_ranks(2, run)
    assert torch.equal(*results)
    assert not torch.equal(results[0], alone), "columns that are split have other scales"
    assert (results[0] - want).abs().mean() < 1.2 * (alone - want).abs().mean()


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("smollm_like", 2), ("smollm_like", 3), ("smollm_like", 4), ("biases", 2), ("llama2_like", 4), ("llama3_like", 4)],
)
def test_ranks_together_are_the_whole_model(tmp_path: Path, name: str, num_ranks: int) -> None:
    reference = save(tmp_path, **CONFIGS[name])
    token_ids = torch.randint(101, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    want = reference(torch.tensor([token_ids])).logits[0]

    def run(group: RankGroup) -> torch.Tensor:
        model = Decoder(tmp_path, dtype=torch.float32, max_tokens=64, rank=group.rank, num_ranks=num_ranks)
        model.collectives = Collectives(group, max_rows=40, hidden_size=model.config.hidden_size)
        return logits_in_two_steps(model, token_ids, 20)

    results = on_ranks(num_ranks, run)
    torch.testing.assert_close(results[0], want, atol=2e-4, rtol=1e-4)
    assert all(torch.equal(result, results[0]) for result in results), "ranks sample from the same bytes"


@pytest.mark.parametrize("has_control", [False, True])
def test_a_step_has_the_same_collectives_with_trees_to_keep_equal_and_without(
    tmp_path: Path, has_control: bool
) -> None:
    save(tmp_path, **CONFIGS["smollm_like"])

    def run(group: RankGroup) -> tuple[int, int]:
        model = Decoder(tmp_path, dtype=torch.float32, max_tokens=64, rank=group.rank, num_ranks=2)
        hidden = model.config.hidden_size
        control = ControlRows(rank=group.rank, num_ranks=2, num_carriers=7, hidden_size=hidden, status_bytes=36)
        control.write(bytes(36))
        model.collectives = collectives = Collectives(
            group, max_rows=40, hidden_size=hidden, control=control if has_control else None
        )
        logits_in_two_steps(model, list(range(40)), 20)
        return collectives.num_all_reduces, collectives.num_all_gathers

    assert on_ranks(2, run) == [(2 * (1 + 2 * 3), 2)] * 2


def test_native_ops_equal_torch() -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    native, plain = CpuOps(), TorchOps()
    x, y, weight, bias, norm = random(5, 48), random(5, 48), random(96, 48), random(96), random(48)
    torch.testing.assert_close(native.linear(weight, bias)(x), plain.linear(weight, bias)(x), atol=1e-4, rtol=1e-4)
    sums = x.clone(), x.clone()
    normed = [ops.rms_norm(s, norm, 1e-5, residual=y) for ops, s in zip((native, plain), sums, strict=True)]
    torch.testing.assert_close(*normed)
    torch.testing.assert_close(*sums)
    torch.testing.assert_close(native.silu_mul(x), plain.silu_mul(x))
    angles = random(5, 8)
    split = [ops.rope_qkv(random_qkv, angles.cos(), angles.sin(), 2, 1)
             for random_qkv in [random(5, 64)] for ops in (native, plain)]  # fmt: skip
    for one, other in zip(*split, strict=True):
        torch.testing.assert_close(one, other)


def test_foreign_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        DecoderConfig.load(tmp_path)
    GPTNeoXConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="model_type is gpt_neox; the decoder knows: llama, mistral, phi3, qwen2"):
        DecoderConfig.load(tmp_path)
    LlamaConfig(hidden_act="gelu").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="hidden_act is gelu"):
        DecoderConfig.load(tmp_path)
    LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="rope_type is dynamic"):
        DecoderConfig.load(tmp_path)
    LlamaConfig(num_key_value_heads=4, num_attention_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        Decoder(tmp_path, dtype=torch.float32, max_tokens=16)
    with pytest.raises(ModelError, match="tensor_parallel_size is 5; the model has 4 attention heads"):
        Decoder(tmp_path, dtype=torch.float32, max_tokens=16, num_ranks=5)
