"""Ingress and engine name a prompt's chunks alike, byte for byte, over every way in which a prompt may come."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chunkserve.deploy.config import ServeConfig
from chunkserve.deploy.ingress import build_http_app
from chunkserve.replica.tokenizer import Tokenizer

from .in_process_cluster import CHUNK, SCHEME, Cluster, replica_name

pytestmark = pytest.mark.model

PROMPTS = Path(__file__).parents[2] / "../shared/workloads/prompts.jsonl"
TOOL = {
    "name": "search",
    "description": "Find pages.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
}
TOOLS_TEXT = "You may call these tools:\n" + "\n".join(json.dumps(TOOL | {"name": f"search_{i}"}) for i in range(6))
TALK = [
    {"role": "system", "content": TOOLS_TEXT},
    {"role": "user", "content": "Where is Rome? 🙂 Où est-ce?"},
    {"role": "assistant", "content": '{"name": "search_1", "arguments": {"query": "Rome"}}'},
    {"role": "user", "content": "Result: in Italy.\n\nAnd   what  is\tthe\r\nriver?"},
]
CASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Tell me of the sea. " * 12}]},
    "chat with tools and their calls": {"messages": TALK},
    "chat in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "One. " * 20}]}]},
    "completions": {"prompt": "Once upon a time there was a lighthouse. " * 8},
    "tools text, with the template's own marks": {"prompt": f"<|im_start|>system\n{TOOLS_TEXT}<|im_end|>\n"},
    "token ids": {"prompt": [1000 + 7 * i for i in range(10 * CHUNK)]},
    "token ids, one short of a chunk": {"prompt": [2000 + 7 * i for i in range(10 * CHUNK - 1)]},
}


@pytest.fixture
async def cluster(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr("chunkserve.replica.replica_actor._replica_name", replica_name.get)
    cluster = Cluster(tokenizer, ["a"])
    yield cluster
    await cluster.close()


@pytest.fixture
async def http(cluster: Cluster, small_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = ServeConfig(max_sequence_tokens=2048, chunk_size_tokens=CHUNK)
    transport = httpx.ASGITransport(build_http_app(config, Tokenizer(small_model), cluster.client))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=60) as client:
        yield client


def token_ids_of(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    """By transformers' own functions."""
    if "messages" in body:
        messages = [
            message
            if isinstance(message["content"], str)
            else message | {"content": "".join(part["text"] for part in message["content"])}
            for message in body["messages"]
        ]
        text = tokenizer.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.backend(text, add_special_tokens=False)["input_ids"]
    if isinstance(body["prompt"], str):
        return tokenizer.backend(body["prompt"])["input_ids"]
    return body["prompt"]


@pytest.mark.parametrize("case", CASES)
async def test_the_engine_stores_what_the_ingress_names(
    case: str, http: httpx.AsyncClient, cluster: Cluster, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[tuple[bytes, ...]] = []
    open_ = cluster.state.open
    monkeypatch.setattr(cluster.state, "open", lambda *a: (named.append(a[2]), open_(*a)))
    body = CASES[case]
    path = f"/v1/{'chat/' if 'messages' in body else ''}completions"
    answer = await http.post(path, json=body | {"max_tokens": 1, "temperature": 0, "cache_salt": "mine"})
    assert answer.status_code == 200, answer.text
    wanted = SCHEME.digests("mine", token_ids_of(tokenizer, body))
    assert named == [wanted]
    assert len(wanted) >= 3
    # A chunk is the tree's once the step that fills it is committed.
    journal = cluster.replicas["a"].reporter.journal
    async with asyncio.timeout(5):
        while len(journal) < len(wanted):
            await asyncio.sleep(0.01)
    stored = journal.delta(None).changes
    assert [digest for digest, _, _ in stored] == list(wanted)
    assert [parent for _, parent, _ in stored] == [None, *wanted[:-1]]


@pytest.mark.skipif(not PROMPTS.exists(), reason="the prompts are not beside the repository")
async def test_real_tool_prompts_are_found_up_to_their_last_full_chunk(
    http: httpx.AsyncClient, cluster: Cluster, tokenizer: Tokenizer
) -> None:
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()]
    text = min(texts, key=len)
    prompts = [text + end for end in ("Question: what is one and one?", "A longer one: who was in Rome, and when?")]
    answers = []
    for prompt in prompts:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        answers.append(await http.post("/v1/chat/completions", json=body, headers={"x-chunkserve-explain": "1"}))
    ids = [token_ids_of(tokenizer, {"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]
    common = next(at for at, (one, other) in enumerate(zip(*ids, strict=False)) if one != other)
    assert int(answers[0].headers["x-chunkserve-predicted-cached-tokens"]) == 0
    assert int(answers[1].headers["x-chunkserve-predicted-cached-tokens"]) == common // CHUNK * CHUNK > 0
    assert int(answers[1].headers["x-chunkserve-cached-tokens"]) == common
