"""Any decoder of transformers that attends through its attention interface, over our attention and our KV memory.

transformers computes everything beside attention; a layer's attention comes to us with queries, keys and values of the
step's tokens, rotated as the model wants them. Before any weight is read, the model is built without memory and run
once to see what it asks of attention: that gives the sizes and masks, and the reason where it asks for too much.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.share import HeadShare
from chunkserve.kernels.dispatch import AttentionProblem, Backend
from chunkserve.kernels.plan import AttentionPlan, build_plan

from .kv_store import KVStore
from .model import decoder_rejects
from .model_config import LayerMask, ModelConfig, ModelError, eos_token_ids, max_context_tokens, read_config

_IMPLEMENTATION: Final = "chunkserve"
# Tensors that come with a layer's attention and do not change it: positions are in q and k already, the sink is ours.
_KNOWN_TENSORS: Final = ("position_ids", "cache_position", "s_aux")
# Largest relative error of a row of logits against transformers' own, a quarter of the rows left out: rounding in half
# precision makes up to 7 % in small random models, wrong positions make a half and more.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
_MAX_CHECKED_TOKENS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """What the engine needs to know; `not_shared` says why the model cannot be shared among ranks."""

    not_shared: str

    @classmethod
    def load(cls, folder: Path) -> "TransformersConfig":
        """Read a model folder's config, and what the model asks of attention.

        Raises:
            ModelError: we cannot give it that, or it is no decoder.
        """
        config = read_config(folder)
        name = f"model_type is {config.model_type}"
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{name}, which transformers has no causal language model for")
        calls = _asked_of_attention(config, name)
        num_heads, num_kv_heads, head_dim = calls[0].shape
        return cls(
            hidden_size=config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_context_tokens=max_context_tokens(config),
            eos_token_ids=eos_token_ids(config, folder),
            dtype=config.dtype or torch.float32,
            masks=tuple(call.mask for call in calls),
            not_shared=decoder_rejects(config) or "",
        )

    def heads(self, rank: int = 0, num_ranks: int = 1) -> HeadShare:
        if num_ranks > 1:
            raise ModelError(
                f"tensor_parallel_size is {num_ranks}; only what our own decoder runs is shared among ranks, and "
                f"{self.not_shared}"
            )
        return HeadShare.of(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, rank=rank, num_ranks=num_ranks)


class TransformersModel:
    """A whole model on one device.

    Args:
        folder: a Hugging Face folder with safetensors.
        config: of it.
        dtype: of weights and activations; None is the stored one.
        device: "cpu" or "cuda".
    """

    def __init__(
        self, folder: Path, config: TransformersConfig, *, dtype: torch.dtype | None = None, device: str = "cpu"
    ) -> None:
        self.config = config
        self.dtype = self.activation_dtype = dtype or config.dtype
        self.device = device
        self.collectives: Collectives | None = None
        self._model = _load(folder, self.dtype).to(device).eval()
        self._slices_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._step: _Step | None = None
        _give_attention(self._model, self._attend)

    def problems(self, chunk_size: int) -> tuple[AttentionProblem, ...]:
        """The attention of each layer."""
        return self.config.problems(device=self.device, dtype=self.dtype, chunk_size=chunk_size)

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, kv: KVStore, logit_rows: Tensor
    ) -> Tensor:
        """One step; see `Model.forward`."""
        self._step = _Step(plan=plan, kv=kv)
        options = {"logits_to_keep": logit_rows} if self._slices_logits else {}
        try:
            logits = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **options
            ).logits[0]  # fmt: skip
        finally:
            self._step = None
        return (logits if self._slices_logits else logits[logit_rows]).float()

    def check(self, backend: Backend, chunk_size: int) -> None:
        """Compare with transformers' own attention on two made-up prompts, so that a model which keeps something of
        earlier tokens elsewhere, or takes its positions from elsewhere, is found before it serves.

        Raises:
            ModelError: the logits differ.
        """
        windows = [mask.window for mask in self.config.masks if mask.window is not None]
        size = min(max(24, min(windows, default=0) + 8), _MAX_CHECKED_TOKENS, self.config.max_context_tokens)
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(self.config.vocab_size, (n,), generator=generator).to(self.device) for n in (size, size // 2)
        ]
        with torch.inference_mode():
            ours = self._in_two_steps(prompts, backend, chunk_size)
            self._model.set_attn_implementation("eager")
            theirs = torch.cat([self._model(input_ids=ids[None], use_cache=False).logits[0] for ids in prompts]).float()
            self._model.set_attn_implementation(_IMPLEMENTATION)
        # Not the worst row, since rounding may choose another expert; not the median, since half of the rows are of the
        # first step, where many a mistake does not show.
        error = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).quantile(0.75).item()
        if not error <= _TOLERANCE[self.dtype]:
            raise ModelError(
                f"the model's logits over our attention differ from transformers' own by {error:.1%}: it keeps more of "
                "earlier tokens than keys and values, or finds positions in its own way"
            )

    def _in_two_steps(self, prompts: list[Tensor], backend: Backend, chunk_size: int) -> Tensor:
        """Logits of all rows, prompt by prompt; each prompt's second half comes after both first halves."""
        num_chunks = -(-_MAX_CHECKED_TOKENS // chunk_size)
        kv = KVStore(backend, self.problems(chunk_size), num_slots=num_chunks * len(prompts))
        paths = torch.arange(kv.num_slots, dtype=torch.int32).view(len(prompts), -1).numpy()
        halves: list[list[Tensor]] = [[] for _ in prompts]
        begins, ends = [0 for _ in prompts], [len(ids) // 2 for ids in prompts]
        for _ in range(2):
            sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
            plan = build_plan(paths=list(paths), kv_lens=ends, q_lens=sizes, kv_present=begins, chunk_size=chunk_size)
            token_ids = torch.cat([ids[b:e] for ids, b, e in zip(prompts, begins, ends, strict=True)])
            positions = torch.cat([torch.arange(b, e, device=self.device) for b, e in zip(begins, ends, strict=True)])
            rows = torch.arange(len(token_ids), device=self.device)
            for half, logits in zip(
                halves, self.forward(token_ids, positions, plan, kv, rows).split(sizes), strict=True
            ):
                half.append(logits)
            begins, ends = ends, [len(ids) for ids in prompts]
        return torch.cat([logits for half in halves for logits in half])

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """The next layer's attention: [1, H, T, D] with [1, G, T, D] -> [1, T, H, D]."""
        assert self._step is not None, "attention outside of a step"
        step, kv = self._step, self._step.kv
        layer = kv.layers[step.next_layer]
        step.next_layer += 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.to(layer.problem.dtype) for x in (k, v))
        kv.backend.append(layer, k, v, step.plan)
        attended = kv.backend.attend(
            q.to(self.dtype),
            layer,
            step.plan,
            scale=self.config.head_dim**-0.5 if scaling is None else scaling,
            sinks=None if s_aux is None else s_aux.float(),
        )
        return attended[None].to(value.dtype), None


@dataclass(slots=True, kw_only=True)
class _Step:
    """What the layers of a running step share."""

    plan: AttentionPlan
    kv: KVStore
    next_layer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a layer asks of attention; the shape is H, G, D."""

    shape: tuple[int, int, int]
    mask: LayerMask


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: leads to the model that the layer belongs to."""
    return module.chunk_attention(query, key, value, attention_mask=attention_mask, module=module, **options)


AttentionInterface.register(_IMPLEMENTATION, _attention)


def _give_attention(model: Any, attend: Callable[..., tuple[Tensor, None]]) -> None:
    # Some models look for padding among the tokens, to warn: on a GPU that waits, and there is none.
    model.config.pad_token_id = None
    # Which of the modules is an attention layer, only the model knows.
    for module in model.modules():
        module.chunk_attention = attend


def _load(folder: Path, dtype: torch.dtype) -> Any:
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model folder {folder} has no *.safetensors")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_IMPLEMENTATION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load {folder}: {error}") from error
    # transformers fills these with random numbers.
    if absent := sorted(info["missing_keys"]):
        raise ModelError(f"the model folder has no tensor {absent[0]}")
    return model


def _asked_of_attention(config: Any, name: str) -> list[_Call]:
    """What each layer asks, seen in a model without memory for its weights."""
    calls: list[_Call] = []

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
        if reason := _rejects(query, key, value, **options):
            raise ModelError(f"{name}: {reason} (layer {len(calls)})")
        mask = LayerMask(window=options.get("sliding_window"), softcap=options.get("softcap"))
        calls.append(_Call(shape=(query.shape[1], key.shape[1], query.shape[3]), mask=mask))
        return query.transpose(1, 2), None

    try:
        with torch.device("meta"), torch.inference_mode():
            # The other implementations of experts look at values, and there are none.
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=_IMPLEMENTATION, experts_implementation="batched_mm"
            ).eval()
            if "position_ids" not in inspect.signature(model.forward).parameters:
                raise ModelError(f"{name}, whose forward takes no position_ids: it counts tokens itself")
            _give_attention(model, record)
            ids = torch.zeros((1, 2), dtype=torch.int64)
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except ModelError:
        raise
    except Exception as error:  # A foreign model may fail in any way.
        raise ModelError(
            f"{name}, which does not run through transformers' attention interface: {type(error).__name__}: {error}"
        ) from error
    if len(calls) != config.num_hidden_layers:
        raise ModelError(
            f"{name}: {len(calls)} of its {config.num_hidden_layers} layers (num_hidden_layers) attend through "
            "transformers' attention interface; served are models where all do"
        )
    if len(shapes := {call.shape for call in calls}) > 1:
        sizes = ", ".join(f"{h}/{g}/{d}" for h, g, d in sorted(shapes))
        raise ModelError(f"{name}: its layers differ in query heads/KV heads/head_dim: {sizes}; served is one size")
    return calls


def _rejects(query: Tensor, key: Tensor, value: Tensor, *, module: Any, **options: Any) -> str | None:
    """Why a layer's attention is none that our kernels compute."""
    if key.shape != value.shape or key.shape[3] != query.shape[3]:
        return (
            f"queries and keys have {key.shape[3]} dimensions and {key.shape[1]} heads, values {value.shape[3]} "
            f"and {value.shape[1]} (as in multi-head latent attention); served are equal ones"
        )
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "attention is not causal (is_causal); served are causal decoders"
    if options.get("attention_mask") is not None:
        return "the model makes an attention mask of its own; served are causal masks and sliding windows"
    for option, given in options.items():
        if isinstance(given, Tensor) and option not in _KNOWN_TENSORS:
            return f"attention takes {option}, which our kernels do not know"
    return None
