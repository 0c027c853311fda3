"""ServeConfig: every knob of the server, with its unit, default and check. Read once at the start, then passed on."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from chunkserve.router.policy import POLICIES, policy_options

from .small_model import NAME as SMALL_MODEL

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


# The file that `chunkserve serve` and `make serve` take when none is named.
DEFAULT_FILE = Path(__file__).with_name("config.yaml")


class ConfigError(ValueError):
    """A knob is unknown, has a wrong value, or contradicts another one. One line per fault, each naming its knob."""


def parse_bytes(value: object) -> object:
    """A size in bytes out of an int or a text such as "512MB" or "2 GiB"; other values come back as they are."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("expected bytes, as a whole number or as a text like '512MB' or '2GiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _whole_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("expected 'auto' or a whole number of at least 1")


_AutoCount = Annotated[int | Literal["auto"], BeforeValidator(_whole_or_auto)]
_AutoBytes = Annotated[int | Literal["auto"], BeforeValidator(_whole_or_auto), BeforeValidator(parse_bytes)]
_Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class ServeConfig(BaseModel):
    """The `args` of the Serve application in deploy/config.yaml, which explains each knob. Sizes carry their unit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str = Field(default=SMALL_MODEL, min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weight_dtype: Literal["auto", "int8"] = "auto"
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "cpu", "triton", "cuda", "reference"] = "auto"
    num_threads: _AutoCount = "auto"

    num_replicas: int = Field(default=1, ge=1, le=10_000)
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"

    chunk_size_tokens: int = Field(default=64, ge=16, le=256, multiple_of=16)
    kv_pool_bytes: _AutoBytes = "auto"
    kv_pool_chunks: int | None = Field(default=None, ge=2)
    prefix_sharing: bool = True
    retain_prefixes: bool = True
    allow_cache_reset: bool = False

    max_sequence_tokens: int | None = Field(default=None, ge=2)
    max_running_sequences: int = Field(default=64, ge=1, le=65_536)
    max_step_tokens: _AutoCount = "auto"
    max_waiting_requests: int = Field(default=256, ge=0)
    cuda_graphs: bool = True
    deterministic: bool = False

    max_choices: int = Field(default=16, ge=1, le=1024)
    max_prompts_per_request: int = Field(default=64, ge=1, le=4096)
    max_stop_strings: int = Field(default=16, ge=0, le=1024)
    max_stop_string_chars: int = Field(default=256, ge=1, le=65_536)
    max_top_logprobs: int = Field(default=20, ge=0, le=1000)
    max_logit_bias: int = Field(default=300, ge=0, le=100_000)
    max_grammar_bytes: int = Field(default=65_536, ge=0, le=1 << 24)
    max_grammar_compile_s: float = Field(default=1.0, gt=0, le=60)
    max_body_bytes: _Bytes = Field(default=8 * 2**20, ge=1024, le=2**30)

    routing_policy: str = "prefix"
    routing_options: dict[str, Any] = Field(default_factory=dict)
    routing_index_entries: int = Field(default=1_000_000, ge=1)
    routing_report_period_s: float = Field(default=0.5, gt=0)

    stream_interval_tokens: int = Field(default=1, ge=1, le=1024)
    request_timeout_s: float = Field(default=600.0, gt=0)
    health_stall_s: float = Field(default=30.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.kv_pool_chunks is not None and self.kv_pool_bytes != "auto":
            raise ValueError("kv_pool_bytes, kv_pool_chunks: both size the pool; set one of them")
        if self.max_step_tokens != "auto" and self.max_step_tokens < self.max_running_sequences:
            raise ValueError(
                f"max_step_tokens: expected at least max_running_sequences ({self.max_running_sequences}), since each "
                f"running sequence takes one token of a step, got {self.max_step_tokens}"
            )
        return self

    @field_validator("routing_policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        if name not in POLICIES:
            raise ValueError(f"expected one of {', '.join(POLICIES)}")
        return name

    @field_validator("routing_options")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        policy_options(options)
        return options

    @property
    def model_name(self) -> str:
        """The name that clients ask for: `served_model_name`, else the last part of `model`."""
        return self.served_model_name or Path(self.model).name or self.model

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """The config out of a plain mapping, such as parsed YAML.

        Raises:
            ConfigError: one line per fault that names the knob, what it allows, and what came.
        """
        try:
            return cls.model_validate(dict(args))
        except ValidationError as error:
            lines = dict.fromkeys(_line(fault, cls) for fault in error.errors(include_url=False))
            raise ConfigError("\n".join(lines)) from None


def _line(fault: Any, config: type[BaseModel]) -> str:
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    knob = fault["loc"][0]
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(knob), config.model_fields, n=1)
        return f"{knob}: no such knob" + (f"; did you mean {near[0]}?" if near else "")
    for ours, theirs in (("expected", "Input should be"), ("a whole number", "a valid integer"), ("a ", "a valid ")):
        message = message.replace(theirs, ours)
    return f"{knob}: {message[0].lower()}{message[1:]}, got {fault['input']!r:.80}"
