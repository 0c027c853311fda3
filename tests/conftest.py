"""What many tests share: the small real model, and what transformers itself says with it; and how tests share cores."""

import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from .file_lock import locked

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run side by side, and so do what they start: threads of OpenMP and OpenBLAS that wait for each other in a loop
# would take the cores from whom they wait for.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("chunkserve", deadline=None)
settings.load_profile("chunkserve")

NEW_TOKENS = 48
# Start servers, or hold other processes to a time limit: no two of these run side by side.
CLOCK_FILES = (
    "tests/cluster/test_liveness.py",
    "tests/deploy/test_serve.py",
    "tests/deploy/test_serve_rank_groups.py",
    "tests/deploy/test_serve_ranks.py",
    "tests/replica/test_rank_processes.py",
    "tests/router/test_serve_router.py",
)


@dataclass(frozen=True)
class GreedyCase:
    """A prompt, and the NEW_TOKENS tokens that transformers' generate gives in float32, end tokens not heeded."""

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    from chunkserve.deploy.small_model import ensure_small_model

    return ensure_small_model()


@pytest.fixture(scope="session")
def tokenizer(small_model: Path):
    from chunkserve.replica.tokenizer import Tokenizer

    return Tokenizer(small_model)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means here. Above four, what is left is one long test or another."""
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take single tests, in order; one of them takes all CLOCK_FILES, one test after the other."""
    from xdist.scheduler import LoadScopeScheduling

    # Not --dist loadgroup: xdist 3.8 writes the group into a node's _nodeid, which pytest 9.2 does not read.
    class SingleTests(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clock" if nodeid.split("::")[0] in CLOCK_FILES else nodeid

    return SingleTests(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that workers end together."""
    for item in items:
        if item.get_closest_marker("ray") and _file(item) not in CLOCK_FILES:
            raise pytest.UsageError(f"{_file(item)} starts Ray: add it to CLOCK_FILES in tests/conftest.py")
    items.sort(key=_turn)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Engines are cycles of few objects and much memory, which Python would collect late."""
    if item.get_closest_marker("model"):
        gc.collect()


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def _turn(item: pytest.Item) -> int:
    if _file(item) in CLOCK_FILES:
        return 0
    return 1 if item.get_closest_marker("slow") or item.get_closest_marker("timeout") else 2


@pytest.fixture(scope="session")
def greedy_cases(
    small_model: Path, tokenizer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[GreedyCase]:
    """Prompts at the edges of chunks and of each other, with transformers' own greedy continuation."""
    prompts = _prompts(tokenizer)
    assert len(prompts) >= 20
    continuations = _once(
        tmp_path_factory, request, "greedy", lambda: _generate(small_model, list(prompts.values()))
    )  # fmt: skip
    return [
        GreedyCase(name, tuple(prompt), tuple(tokens))
        for (name, prompt), tokens in zip(prompts.items(), continuations, strict=True)
    ]


def _once(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, name: str, compute: Callable[[], Any]
) -> Any:
    """What one worker computes and the others read, as JSON."""
    folder = tmp_path_factory.getbasetemp()
    if not hasattr(request.config, "workerinput"):
        return compute()
    path = folder.parent / f"{name}.json"  # the parent is of this run, and all its workers have it
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            path.write_text(json.dumps(compute()))
    return json.loads(path.read_text())


def _prompts(tokenizer) -> dict[str, list[int]]:
    def chat(question: str, system: str = "You are a helpful AI assistant.") -> list[int]:
        return tokenizer.render_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])

    story = tokenizer.encode(
        "The lighthouse keeper wrote every evening in a heavy book. He noted the wind, the waves, and the "
        "names of the ships that passed. On the third of March a storm came from the north, and for two days nobody "
        "could reach the rock. When the sea was calm again, a small boat brought bread, oil, and a letter from his "
        "sister, who lived in the town behind the hills. She asked whether he was lonely. He thought about it for a "
        "long time, and then he wrote that the light needed him, and that the birds were good company in the spring. "
    )
    rules = " ".join(f"Rule {i}: always answer question number {i} in a short and friendly way." for i in range(1, 21))
    prompts = {
        "capital": chat("What is the capital of France?"),
        "haiku": chat("Write a haiku about the sea."),
        "gravity": chat("Explain gravity to a child in two sentences."),
        "primes": chat("List the first five prime numbers."),
        "one_token": tokenizer.encode("Once")[:1],
        "two_tokens": tokenizer.encode("The sky"),
        "code": tokenizer.encode("def fibonacci(n):\n    "),
        "numbers": tokenizer.encode("1, 2, 3, 4, 5,"),
        "unicode": tokenizer.encode("Der Bär aß Äpfel. 日本語の文です。 🙂"),
        "long": chat("Which rule is the most important one?", rules),
        "long_other_question": chat("How many rules are there?", rules),
        "story": story,
    }
    for length in (63, 64, 65, 127, 128):
        prompts[f"story_{length}"] = story[:length]
    prompts["story_equal_to_mid_chunk"] = [*story[:100], *tokenizer.encode(" But the wind turned")]
    prompts["story_one_token_changed"] = [*story[:64], story[64] + 1, *story[65:128]]
    prompts["story_and_more"] = [*story, *tokenizer.encode("In the autumn the birds left, and")]
    prompts["other_story"] = tokenizer.encode("A baker in a small village") + story[8:90]
    prompts["same_as_capital"] = list(prompts["capital"])
    return prompts


def _generate(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' generate, batched with padding on the left, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    # Two threads of torch wait for each other in a loop, and on busy cores that is many times slower than one.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # In batches of about one length, since padding is computed too.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches: list[list[int]] = []
    for i in order:
        if not batches or len(prompts[i]) > 2 * len(prompts[batches[-1][0]]) + 30:
            batches.append([])
        batches[-1].append(i)
    out: list[list[int]] = [[] for _ in prompts]
    for batch in batches:
        longest = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[0] * (longest - len(prompts[i])) + prompts[i] for i in batch])
        mask = torch.tensor([[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        for i, row in zip(batch, tokens[:, longest:].tolist(), strict=True):
            out[i] = row
    torch.set_num_threads(num_threads)
    return out
