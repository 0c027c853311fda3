"""The decoder of the Llama family over our attention and our KV memory, one rank's share of it.

transformers gives the configuration and the rotary frequencies; the weights come straight from safetensors, and only
this rank's part of them is read.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.share import HeadShare, Share
from chunkserve.kernels.dispatch import AttentionProblem
from chunkserve.kernels.plan import AttentionPlan

from .decoder_ops import CpuOps, DecoderOps, Linear, TorchOps
from .kv_store import KVStore


class ModelError(ValueError):
    """The model folder is no model that we can serve; says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What of a transformers config the decoder needs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def load(cls, folder: Path) -> "DecoderConfig":
        """Read and check a model folder's config.

        Raises:
            ModelError: not there, or not of the Llama family as we serve it.
        """
        if not (folder / "config.json").is_file():
            raise ModelError(f"model folder {folder} has no config.json")
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type != "llama":
            raise ModelError(f"model_type is {config.model_type}; served are: llama")
        if config.hidden_act != "silu":
            raise ModelError(f"hidden_act is {config.hidden_act}; served is: silu")
        rope_type = config.rope_parameters["rope_type"]
        if rope_type not in ("default", "linear", "llama3", "yarn"):
            raise ModelError(f"rope_type is {rope_type}; served are: default, linear, llama3, yarn")
        eos: set[int] = set()
        for source in (config.eos_token_id, _generation_config(folder).get("eos_token_id")):
            eos.update([source] if isinstance(source, int) else source or [])
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
            max_context_tokens=config.max_position_embeddings,
            eos_token_ids=frozenset(eos),
            dtype=config.dtype or torch.float32,
        )

    def heads(self, rank: int = 0, num_ranks: int = 1) -> HeadShare:
        """The attention heads of a rank.

        Raises:
            ModelError: there are not enough for so many ranks.
        """
        if num_ranks > self.num_heads:
            raise ModelError(f"tensor_parallel_size is {num_ranks}; the model has {self.num_heads} attention heads")
        return HeadShare.of(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, rank=rank, num_ranks=num_ranks
        )  # fmt: skip

    def problem(
        self, *, device: str, dtype: torch.dtype, chunk_size: int, rank: int = 0, num_ranks: int = 1
    ) -> AttentionProblem:
        """The attention of a rank."""
        heads = self.heads(rank, num_ranks)
        return AttentionProblem(
            device=device,
            dtype=_activation_dtype(device, dtype),
            kv_dtype=dtype,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=self.head_dim,
            chunk_size=chunk_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer: a rank's heads and MLP columns."""

    input_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """One rank's share of the model.

    Args:
        folder: a Hugging Face folder with safetensors.
        dtype: of weights, K and V; None is the stored one. Activations are float32 on CPUs, else of this type.
        device: "cpu" or "cuda".
        max_tokens: longest sequence, for the rotary tables.
        rank, num_ranks: which part of the heads, MLP columns and vocabulary rows is ours.

    With several ranks `collectives` must be set before `forward`: it sums partial results, and gathers logits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        max_tokens: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.config = config = DecoderConfig.load(folder)
        self._heads = config.heads(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks
        self.dtype, self.device = dtype or config.dtype, device
        self.activation_dtype = _activation_dtype(device, self.dtype)
        self._ops: DecoderOps = CpuOps() if device == "cpu" else TorchOps()
        self.collectives: Collectives | None = None
        self._columns = Share(total=config.intermediate_size, rank=rank, num_ranks=num_ranks)
        vocab = [Share(total=config.vocab_size, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
        self._vocab_widths = [share.size for share in vocab]
        weights = _Weights(folder, self.dtype, device)
        self._embedding = weights.rows("model.embed_tokens.weight")
        self._layers = [self._load_layer(weights, f"model.layers.{i}.", rank) for i in range(config.num_layers)]
        self._final_norm = weights.rows("model.norm.weight").to(self.activation_dtype)
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        self._head = self._ops.linear(weights.rows(head, vocab[rank]), None)
        self._cos, self._sin = _rotary_tables(folder, max_tokens, device)

    def problem(self, chunk_size: int) -> AttentionProblem:
        """This rank's attention."""
        return self.config.problem(
            device=self.device, dtype=self.dtype, chunk_size=chunk_size, rank=self._rank, num_ranks=self._num_ranks
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, kv: KVStore, logit_rows: Tensor
    ) -> Tensor:
        """One step.

        Args:
            token_ids, positions: [T] int64, rows in plan order.
            plan: of this step.
            kv: K and V of earlier tokens; those of this step are appended.
            logit_rows: [R] int64, rows whose logits are wanted.
        Returns:
            [R, V] float32, the same on all ranks.
        """
        config, ops = self.config, self._ops
        num_heads, num_kv_heads = self._heads.num_heads, self._heads.num_kv_heads
        eps, scale = config.norm_eps, config.head_dim**-0.5
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(token_ids, self._embedding).to(self.activation_dtype)
        h = ops.rms_norm(x, self._layers[0].input_norm, eps)
        # Each layer ends with the norm that the next one begins with: adding and normalising are one pass.
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for layer, layer_kv, next_norm in zip(self._layers, kv.layers, next_norms, strict=True):
            q, k, v = ops.rope_qkv(layer.qkv(h), cos, sin, num_heads, num_kv_heads, self.dtype)
            kv.backend.append(layer_kv, k, v, plan)
            attended = kv.backend.attend(q, layer_kv, plan, scale=scale)
            output = self._whole(layer.output, attended.view(len(x), -1))
            h = ops.rms_norm(x, layer.mlp_norm, eps, residual=output)
            down = self._whole(layer.down, ops.silu_mul(layer.gate_up(h)))
            h = ops.rms_norm(x, next_norm, eps, residual=down)
        if not len(logit_rows):
            return torch.empty((0, config.vocab_size), device=self.device)
        logits = self._head(h[logit_rows]).float()
        if self.collectives is None:
            return logits
        return self.collectives.gather_columns(logits, self._vocab_widths)

    def _whole(self, linear: Linear, x: Tensor) -> Tensor:
        """The sum over ranks of their parts of a product."""
        if self.collectives is None:
            return linear(x)
        return self.collectives.all_reduce(linear(x, self.collectives.rows(len(x))))

    def _load_layer(self, weights: "_Weights", prefix: str, rank: int) -> Layer:
        d, heads, columns = self.config.head_dim, self._heads, self._columns
        q_rows = (heads.q_begin * d, heads.q_end * d)
        kv_rows = (heads.kv_begin * d, heads.kv_end * d)
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
        gate_up = ("gate_proj", "up_proj")
        mlp_rows = (columns.begin, columns.end)
        return Layer(
            input_norm=weights.rows(prefix + "input_layernorm.weight").to(self.activation_dtype),
            qkv=self._ops.linear(
                torch.cat([weights.rows(f"{attn}{name}.weight", rows) for name, rows in qkv]),
                weights.joined_bias([(f"{attn}{name}.bias", rows) for name, rows in qkv]),
            ),
            # The bias of a sum over ranks is added by one of them.
            output=self._ops.linear(
                weights.columns(attn + "o_proj.weight", q_rows),
                weights.bias(attn + "o_proj.bias") if rank == 0 else None,
            ),
            mlp_norm=weights.rows(prefix + "post_attention_layernorm.weight").to(self.activation_dtype),
            gate_up=self._ops.linear(
                torch.cat([weights.rows(f"{mlp}{name}.weight", mlp_rows) for name in gate_up]),
                weights.joined_bias([(f"{mlp}{name}.bias", mlp_rows) for name in gate_up]),
            ),
            down=self._ops.linear(
                weights.columns(mlp + "down_proj.weight", mlp_rows),
                weights.bias(mlp + "down_proj.bias") if rank == 0 else None,
            ),
        )


class _Weights:
    """Tensors of a folder's safetensors files, read in part."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"model folder {folder} has no *.safetensors")
        self._file_of = {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                self._file_of.update(dict.fromkeys(tensors.keys(), file))

    def rows(self, name: str, rows: "tuple[int, int] | Share | None" = None) -> Tensor:
        begin, end = (rows.begin, rows.end) if isinstance(rows, Share) else rows or (0, None)
        return self._read(name, lambda part: part[begin:end])

    def columns(self, name: str, columns: tuple[int, int]) -> Tensor:
        return self._read(name, lambda part: part[:, columns[0] : columns[1]])

    def bias(self, name: str, rows: tuple[int, int] | None = None) -> Tensor | None:
        return self.rows(name, rows) if name in self._file_of else None

    def joined_bias(self, parts: list[tuple[str, tuple[int, int]]]) -> Tensor | None:
        biases = [bias for name, rows in parts if (bias := self.bias(name, rows)) is not None]
        return torch.cat(biases) if biases else None

    def _read(self, name: str, cut: Callable[[Any], Tensor]) -> Tensor:
        if name not in self._file_of:
            raise ModelError(f"the model folder has no tensor {name}")
        with safe_open(self._file_of[name], "pt") as tensors:
            return cut(tensors.get_slice(name)).to(self._device, self._dtype)


def _activation_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if device == "cpu" else dtype


def _rotary_tables(folder: Path, max_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position, [max_tokens, D / 2] float32."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        scaling = 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    angles = torch.arange(max_tokens).float()[:, None] * frequencies.float()[None, :]
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}
