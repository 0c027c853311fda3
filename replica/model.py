"""The decoder of Llama and its close relatives over our attention and our KV memory, one rank's share of it.

transformers gives the configuration and the rotary frequencies; the weights come straight from safetensors, and only
this rank's part of them is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.share import HeadShare, Share
from chunkserve.kernels.cpu_decoder import DecoderLayers, LayerWeights
from chunkserve.kernels.cpu_ops import PackedLinear
from chunkserve.kernels.cpu_tpp import CpuBackend
from chunkserve.kernels.dispatch import AttentionProblem
from chunkserve.kernels.plan import AttentionPlan

from .decoder_ops import CpuOps, DecoderOps, Linear, TorchOps, norm_heads
from .kv_store import KVStore
from .model_config import LayerMask, ModelConfig, ModelError, eos_token_ids, max_context_tokens, read_config

# Model types that differ from Llama by what `Decoder` and its configuration name; others run through transformers.
FAMILIES: Final = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")


def decoder_rejects(config: Any) -> str | None:
    """Why the decoder cannot run a transformers config; None when it can."""
    if config.model_type not in FAMILIES:
        return f"model_type is {config.model_type}; the decoder knows: {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}; the decoder knows: silu"
    rope = config.rope_parameters
    if rope["rope_type"] not in _ROPE_TYPES:
        return f"rope_type is {rope['rope_type']}; the decoder knows: {', '.join(_ROPE_TYPES)}"
    if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return f"partial_rotary_factor is {factor}; the decoder knows: 1.0"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """What of a transformers config the decoder needs.

    Attributes:
        fused_projections: q, k and v are stored as one matrix, gate and up as another (Phi-3).
        norms_heads: each head of q and k is normalised before it is rotated (Qwen3).
    """

    intermediate_size: int
    norm_eps: float
    tied_embeddings: bool
    fused_projections: bool
    norms_heads: bool

    @classmethod
    def load(cls, folder: Path) -> "DecoderConfig":
        """Read and check a model folder's config.

        Raises:
            ModelError: not there, or not of the Llama family as we serve it.
        """
        config = read_config(folder)
        if reason := decoder_rejects(config):
            raise ModelError(reason)
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
            max_context_tokens=max_context_tokens(config),
            eos_token_ids=eos_token_ids(config, folder),
            dtype=config.dtype or torch.float32,
            masks=tuple(LayerMask(window=window) for window in _windows(config)),
            fused_projections=config.model_type == "phi3",
            norms_heads=config.model_type == "qwen3",
        )

    def activation_dtype(self, device: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if device == "cpu" else dtype

    def heads(self, rank: int = 0, num_ranks: int = 1) -> HeadShare:
        if num_ranks > self.num_heads:
            raise ModelError(f"tensor_parallel_size is {num_ranks}; the model has {self.num_heads} attention heads")
        return HeadShare.of(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, rank=rank, num_ranks=num_ranks
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer: a rank's heads and MLP columns; `head_norms` of q and of k, [D] each."""

    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """One rank's share of the model.

    Args:
        folder: a Hugging Face folder with safetensors.
        dtype: of weights; None is the stored one. Activations are float32 on CPUs, else of this type.
        weight_dtype: torch.int8 rounds the weights of products, the head's too, with a scale per output; on CPUs.
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
        weight_dtype: torch.dtype | None = None,
        device: str = "cpu",
        max_tokens: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.config = config = DecoderConfig.load(folder)
        self._heads = config.heads(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks
        self.dtype, self.device = dtype or config.dtype, device
        self.activation_dtype = config.activation_dtype(device, self.dtype)
        self._ops: DecoderOps = CpuOps(weight_dtype) if device == "cpu" else TorchOps()
        self.collectives: Collectives | None = None
        self._columns = Share(total=config.intermediate_size, rank=rank, num_ranks=num_ranks)
        vocab = [Share(total=config.vocab_size, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
        self._vocab, self._vocab_widths = vocab[rank], [share.size for share in vocab]
        weights = _Weights(folder, self.dtype, device)
        self._embedding = weights.rows("model.embed_tokens.weight", self._vocab)
        self._layers = [self._load_layer(weights, f"model.layers.{i}.", rank) for i in range(config.num_layers)]
        self._final_norm = self._norm(weights, "model.norm.weight")
        self._head = self._ops.linear(
            self._embedding if config.tied_embeddings else weights.rows("lm_head.weight", self._vocab), None
        )
        self._cos, self._sin = _rotary_tables(folder, max_tokens, device)
        self._scale = config.head_dim**-0.5
        self._native: tuple[KVStore, DecoderLayers] | None = None

    def problems(self, chunk_size: int) -> tuple[AttentionProblem, ...]:
        """This rank's attention, by layers."""
        return self.config.problems(
            device=self.device, dtype=self.dtype, chunk_size=chunk_size, rank=self._rank, num_ranks=self._num_ranks
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, kv: KVStore, logit_rows: Tensor
    ) -> Tensor:
        """One step; see `Model.forward`."""
        config = self.config
        cos, sin = self._cos[positions], self._sin[positions]
        x = self._embedded(token_ids)
        h = self._ops.rms_norm(x, self._layers[0].input_norm, config.norm_eps)
        if (native := self._native_layers(kv)) is not None:
            native(x, h, cos, sin, plan)
        else:
            h = self._run_layers(x, h, cos, sin, plan, kv)
        if not len(logit_rows):
            return torch.empty((0, config.vocab_size), device=self.device)
        logits = self._head(h[logit_rows]).float()
        if self.collectives is None:
            return logits
        return self.collectives.gather_columns(logits, self._vocab_widths)

    def _run_layers(self, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, kv: KVStore) -> Tensor:
        """All layers, piece by piece: x [T, hidden] and its normalised form in, the normalised result out."""
        ops, eps = self._ops, self.config.norm_eps
        num_heads, num_kv_heads = self._heads.num_heads, self._heads.num_kv_heads
        for layer, layer_kv, next_norm in zip(self._layers, kv.layers, self._next_norms(), strict=True):
            qkv = layer.qkv(h)
            if layer.head_norms is not None:
                norm_heads(ops, qkv, layer.head_norms, num_heads, num_kv_heads, eps)
            q, k, v = ops.rope_qkv(qkv, cos, sin, num_heads, num_kv_heads)
            kv.backend.append(layer_kv, k, v, plan)
            attended = kv.backend.attend(q, layer_kv, plan, scale=self._scale)
            output = self._whole(layer.output, attended.view(len(x), -1))
            h = ops.rms_norm(x, layer.mlp_norm, eps, residual=output)
            down = self._whole(layer.down, ops.silu_mul(layer.gate_up(h)))
            h = ops.rms_norm(x, next_norm, eps, residual=down)
        return h

    def _next_norms(self) -> list[Tensor]:
        """The norm that each layer ends with, which is the next one's first: adding and normalising are one pass."""
        return [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]

    def _native_layers(self, kv: KVStore) -> DecoderLayers | None:
        """All layers over this pool as one call, where nothing comes between their products."""
        if not isinstance(self._ops, CpuOps) or self.collectives is not None or kv.backend.name != CpuBackend.name:
            return None
        if self._native is None or self._native[0] is not kv:
            weights = [_native_weights(*pair) for pair in zip(self._layers, self._next_norms(), strict=True)]
            self._native = kv, DecoderLayers(weights, kv.layers, eps=self.config.norm_eps, scale=self._scale)
        return self._native[1]

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, K]; a rank adds zeros for tokens of other ranks, so that the sum is exact."""
        if self.collectives is None:
            return F.embedding(token_ids, self._embedding).to(self.activation_dtype)
        own = token_ids - self._vocab.begin
        is_other = (own < 0) | (own >= self._vocab.size)
        partial = self.collectives.rows(len(token_ids))
        partial.copy_(F.embedding(own.masked_fill_(is_other, 0), self._embedding))
        partial.masked_fill_(is_other[:, None], 0.0)
        return self.collectives.all_reduce(partial).clone()

    def _whole(self, linear: Linear, x: Tensor) -> Tensor:
        """The sum over ranks of their parts of a product."""
        if self.collectives is None:
            return linear(x)
        return self.collectives.all_reduce(linear(x, self.collectives.rows(len(x))))

    def _load_layer(self, weights: "_Weights", prefix: str, rank: int) -> Layer:
        config, d, heads, columns = self.config, self.config.head_dim, self._heads, self._columns
        q_rows = (heads.q_begin * d, heads.q_end * d)
        kv_rows = (heads.kv_begin * d, heads.kv_end * d)
        mlp_rows = (columns.begin, columns.end)
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        if config.fused_projections:
            q_size, kv_size, mlp_size = config.num_heads * d, config.num_kv_heads * d, config.intermediate_size
            begins = (0, q_size, q_size + kv_size)
            qkv = [("qkv_proj", _moved(r, begin)) for r, begin in zip((q_rows, kv_rows, kv_rows), begins, strict=True)]
            gate_up = [("gate_up_proj", _moved(mlp_rows, begin)) for begin in (0, mlp_size)]
        else:
            qkv = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
            gate_up = [("gate_proj", mlp_rows), ("up_proj", mlp_rows)]
        return Layer(
            input_norm=self._norm(weights, prefix + "input_layernorm.weight"),
            qkv=self._joined(weights, attn, qkv),
            head_norms=(self._norm(weights, attn + "q_norm.weight"), self._norm(weights, attn + "k_norm.weight"))
            if config.norms_heads
            else None,
            # The bias of a sum over ranks is added by one of them.
            output=self._ops.linear(
                weights.columns(attn + "o_proj.weight", q_rows),
                weights.bias(attn + "o_proj.bias") if rank == 0 else None,
            ),
            mlp_norm=self._norm(weights, prefix + "post_attention_layernorm.weight"),
            gate_up=self._joined(weights, mlp, gate_up),
            down=self._ops.linear(
                weights.columns(mlp + "down_proj.weight", mlp_rows),
                weights.bias(mlp + "down_proj.bias") if rank == 0 else None,
            ),
        )

    def _norm(self, weights: "_Weights", name: str) -> Tensor:
        return weights.rows(name).to(self.activation_dtype)

    def _joined(self, weights: "_Weights", prefix: str, parts: list[tuple[str, tuple[int, int]]]) -> Linear:
        """One product with rows of several matrices."""
        return self._ops.linear(
            torch.cat([weights.rows(f"{prefix}{name}.weight", rows) for name, rows in parts]),
            weights.joined_bias([(f"{prefix}{name}.bias", rows) for name, rows in parts]),
        )


def _native_weights(layer: Layer, next_norm: Tensor) -> LayerWeights:
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    qkv, output, gate_up, down = (product for product in products if isinstance(product, PackedLinear))
    q_norm, k_norm = layer.head_norms or (None, None)
    return LayerWeights(
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, output=output, mlp_norm=layer.mlp_norm, gate_up=gate_up, down=down,
        next_norm=next_norm,
    )  # fmt: skip


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


def _moved(rows: tuple[int, int], by: int) -> tuple[int, int]:
    return rows[0] + by, rows[1] + by


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, where its family has one."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("qwen2", "qwen3"):
        return [window if layer_type == "sliding_attention" else None for layer_type in config.layer_types]
    return [window if config.model_type in ("mistral", "phi3") else None] * config.num_hidden_layers


def _rotary_tables(folder: Path, max_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position, [max_tokens, D / 2] float32."""
    config = read_config(folder)
    rope, head_dim = config.rope_parameters, _head_dim(config)
    if rope["rope_type"] == "default":
        frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        scaling = 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    angles = torch.arange(max_tokens).float()[:, None] * frequencies.float()[None, :]
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)
