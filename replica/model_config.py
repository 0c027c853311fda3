"""What a model folder's configuration says, and what of it nobody here can serve."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from chunkserve.cluster.share import HeadShare
from chunkserve.kernels.dispatch import AttentionProblem

# These change the frequencies of a token that is cached already when the text grows.
_GROWING_ROPE: Final = ("dynamic", "longrope")
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")


class ModelError(ValueError):
    """The model folder is no model that we can serve; says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMask:
    """What is particular about a layer's attention; see AttentionProblem."""

    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know of a model; `masks` has one entry per layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    masks: tuple[LayerMask, ...]

    @property
    def num_layers(self) -> int:
        return len(self.masks)

    def activation_dtype(self, device: str, dtype: torch.dtype) -> torch.dtype:
        """Of what is between the weights of type `dtype`."""
        return dtype

    def heads(self, rank: int = 0, num_ranks: int = 1) -> HeadShare:
        """The attention heads of a rank.

        Raises:
            ModelError: the model cannot be shared among so many ranks.
        """
        return HeadShare.of(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, rank=rank, num_ranks=num_ranks
        )  # fmt: skip

    def problems(
        self,
        *,
        device: str,
        dtype: torch.dtype,
        chunk_size: int,
        kv_dtype: torch.dtype | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> tuple[AttentionProblem, ...]:
        """The attention of a rank, by layers.

        Args:
            dtype: of weights; also of K and V unless `kv_dtype` says otherwise.
        """
        heads = self.heads(rank, num_ranks)
        return tuple(
            AttentionProblem(
                device=device,
                dtype=self.activation_dtype(device, dtype),
                kv_dtype=kv_dtype or dtype,
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=self.head_dim,
                chunk_size=chunk_size,
                window=mask.window,
                softcap=mask.softcap,
            )
            for mask in self.masks
        )


def read_config(folder: Path) -> Any:
    """transformers' configuration of a folder.

    Raises:
        ModelError: there is none, or it asks for what no path here can serve.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"model folder {folder} has no config.json")
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    model_type = stored.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in stored:
            raise ModelError(f"model_type is {model_type}, with code of its own (auto_map); it is not run here")
        raise ModelError(f"model_type is {model_type}, which transformers {transformers.__version__} does not know")
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Each configuration checks its fields in its own way.
        raise ModelError(f"transformers cannot read {path}: {error}") from error
    if reason := _not_servable(config):
        raise ModelError(reason)
    return config


def eos_token_ids(config: Any, folder: Path) -> frozenset[int]:
    """All tokens that end a text."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    eos: set[int] = set()
    for source in (config.eos_token_id, generation.get("eos_token_id")):
        eos.update([source] if isinstance(source, int) else source or [])
    return frozenset(eos)


def max_context_tokens(config: Any) -> int:
    """
    Raises:
        ModelError: the configuration does not say.
    """
    tokens = getattr(config, "max_position_embeddings", None)
    if not isinstance(tokens, int):
        raise ModelError(f"max_position_embeddings is {tokens}; expected the number of tokens of the model's context")
    return tokens


def _not_servable(config: Any) -> str | None:
    name = f"model_type is {config.model_type}"
    if config.is_encoder_decoder:
        return f"{name}, an encoder with a decoder (is_encoder_decoder); served are decoders alone"
    if config.get_text_config() is not config:
        return f"{name}, which is more than a text model (text_config); served are text models"
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        return f"quantization_config is {method}; served are weights in float32, bfloat16, float16"
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)):
        return f"{name} with layers of {', '.join(other)} (layer_types); served are {', '.join(_LAYER_TYPES)}"
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if rope in _GROWING_ROPE:
            return f"rope_type is {rope}, which turns cached keys anew as a text grows; they are kept as they are here"
    return None


def _rope_types(parameters: Any) -> Iterator[str]:
    """Of a model, or of each type of its layers."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)
