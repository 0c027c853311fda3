"""Edits survive their bytes, in whatever pieces these come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkserve.replica.protocol import GrammarSpec, Request, SamplingParams
from chunkserve.replica.tree_edit import Clear, EditError, EditReader, Join, Leave, TreeEdit, encode

U31 = st.integers(0, 2**31 - 1)
KINDS = st.sampled_from(["json_schema", "regex"])
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def joins(draw: st.DrawFn) -> Join:
    arrival = draw(st.integers(1, 2**40))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 2**40)), temperature=draw(FLOATS), top_p=draw(FLOATS), top_k=draw(U31),
        min_p=draw(FLOATS), ignore_eos=draw(st.booleans()), stop_token_ids=tuple(draw(st.lists(U31, max_size=5))),
        presence_penalty=draw(FLOATS), frequency_penalty=draw(FLOATS), repetition_penalty=draw(FLOATS),
        grammar=draw(st.none() | st.builds(GrammarSpec, kind=KINDS, text=st.text(max_size=9), param=st.just(""))),
        logit_bias=tuple(draw(st.lists(st.tuples(U31, FLOATS), max_size=5))),
    )  # fmt: skip
    request = Request(
        request_id=f"arrival {arrival}", prompt_token_ids=tuple(draw(st.lists(U31, min_size=1, max_size=40))),
        sampling=sampling, n=draw(st.integers(1, 1000)), cache_salt=draw(st.text(max_size=10)),
        prefix_cache=draw(st.booleans()),
    )  # fmt: skip
    return Join(arrival=arrival, request=request, seed=draw(st.integers(-(2**63), 2**63 + 1000)))


EDITS = st.one_of(joins(), st.builds(Leave, arrival=st.integers(1, 2**63)), st.just(Clear()))


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(EDITS, max_size=6), data=st.data())
def test_edits_come_back_whatever_the_pieces(edits: list[TreeEdit], data: st.DataObject) -> None:
    stream = b"".join(map(encode, edits))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader = EditReader()
    read: list[TreeEdit] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += reader.feed(stream[begin:end])
    assert read == edits


def test_a_token_costs_four_bytes() -> None:
    def size(num_tokens: int) -> int:
        request = Request(
            request_id="r", prompt_token_ids=(7,) * num_tokens, sampling=SamplingParams(max_tokens=1)
        )  # fmt: skip
        return len(encode(Join(arrival=1, request=request, seed=0)))

    assert size(100_000) - size(1) == 4 * 99_999


@pytest.mark.parametrize("stream", [b"X\0\0\0\0", b"L\x01\0\0\0a", b"J\x02\0\0\0ab", b"C\x01\0\0\0x"])
def test_a_broken_stream_is_told(stream: bytes) -> None:
    with pytest.raises(EditError):
        list(EditReader().feed(stream))
