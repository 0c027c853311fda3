"""Incremental text equals the text of all tokens; stop strings end it wherever token borders lie."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from chunkserve.replica.tokenizer import ChatTemplateError, Detokenizer, StopStrings, Tokenizer


def joined(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(detokenizer.add(token_id) for token_id in token_ids) + detokenizer.finish()


@pytest.mark.model
@pytest.mark.parametrize("seed", range(4))
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Half of the draws are tokens that hold parts of characters, which random text rarely has in sequence.
    partial = [i for i in range(tokenizer.vocab_size) if any(byte >= 0x80 for byte in tokenizer.token_bytes(i))]
    for _ in range(250):
        pool = partial if rng.random() < 0.5 else range(tokenizer.vocab_size)
        token_ids = [rng.choice(pool) for _ in range(rng.randrange(1, 40))]
        assert joined(tokenizer, token_ids) == tokenizer.decode(token_ids)


@pytest.mark.model
def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    text = "naïve 日本語 🙂 crème — ok"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.model
def test_chat_is_rendered_with_the_models_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "system\nBe brief.\nuser\nHi\nassistant\n"


def make_byte_fallback_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer of SentencePiece's kind: spaces as a mark, unknown characters as byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["▁", "▁the", "▁cat", "s", "a", "▁is"]:
        vocab[piece] = len(vocab)
    backend = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    LlamaConfig(vocab_size=len(vocab)).save_pretrained(folder)
    return Tokenizer(folder)


def test_byte_fallback_pieces_join_to_the_whole_text(tmp_path: Path) -> None:
    tokenizer = make_byte_fallback_tokenizer(tmp_path)
    assert not tokenizer.is_byte_level
    size = tokenizer.vocab_size
    smile = [3 + byte for byte in "🙂é".encode()]
    for token_ids in ([size - 5, size - 4, size - 3], smile, [size - 4, *smile, size - 5, size - 1, size - 2]):
        assert joined(tokenizer, token_ids) == tokenizer.decode(token_ids)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_cut_at_the_first_match(text: str, stop: list[str], data: st.DataObject) -> None:
    checker = StopStrings(stop)
    out, rest = "", text
    while rest and not checker.found:
        size = data.draw(st.integers(1, len(rest)))
        out += checker.add(rest[:size])
        rest = rest[size:]
    out += checker.finish()
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    assert checker.found == bool(ends)
    if not ends:
        assert out == text
    else:
        assert text.startswith(out)
        # The first match to become complete ends the text; one that begins earlier may only be a longer one.
        assert not any(s in out for s in stop)
