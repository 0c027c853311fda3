"""Text to token ids and back: the model's own tokenizer and chat template, and text that grows token by token."""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}
_REPLACEMENT = "\ufffd"

# Classes whose whole behaviour is in tokenizer.json.
_FILE_ONLY_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


class ChatTemplateError(ValueError):
    """The model's chat template refuses the messages, or there is no template."""


class Tokenizer:
    """The tokenizer of a model folder. Not thread-safe: one instance per thread.

    vocab_size: rows of the model's output, which may be more than the tokenizer's own tokens.
    max_context_tokens: what the model was trained for.
    """

    def __init__(self, model_path: str | Path) -> None:
        folder = Path(model_path)
        self._tokenizer: Any = _load_tokenizer(folder)
        self.vocab_size, self.max_context_tokens = _model_sizes(folder)
        added = self._tokenizer.added_tokens_decoder
        self._special_ids = frozenset(self._tokenizer.all_special_ids) | {i for i in added if added[i].special}
        self._added = {int(i): str(added[i].content) for i in added}
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.is_byte_level = backend is not None and "ByteLevel" in str(type(backend.decoder)) + str(backend.decoder)

    @property
    def backend(self) -> Any:
        """transformers' tokenizer."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds by itself."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn.

        Raises:
            ChatTemplateError: the template raised, or the model has none.
        """
        if not self._tokenizer.chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id beyond the tokenizer's own."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            return bytes(_BYTE_OF_CHAR[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _model_sizes(folder: Path) -> tuple[int, int]:
    """vocab_size and max_position_embeddings; where config.json has not both under these names, transformers knows."""
    stored = json.loads((folder / "config.json").read_text())
    if "vocab_size" in stored and "max_position_embeddings" in stored:
        return stored["vocab_size"], stored["max_position_embeddings"]
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config.vocab_size, config.max_position_embeddings


def _load_tokenizer(folder: Path) -> Any:
    """AutoTokenizer's choice. That imports torch (5 s), so a class that needs no choice is taken at once."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    if (folder / "tokenizer.json").is_file() and settings.get("tokenizer_class") in _FILE_ONLY_CLASSES:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Detokenizer:
    """Text that grows token by token; the pieces joined are `Tokenizer.decode` of all ids, and none ends inside a
    character. Linear in the number of tokens. (Byte-fallback tokenizers turn whole runs of byte tokens into U+FFFD when
    any of them is no UTF-8; of such a run what was complete has been given out as it was.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Without byte-level tokens: the last complete piece as context for spacing, and the tokens since.
        self._context: list[int] = []
        self._open: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is open."""
        if self._tokenizer.is_special(token_id):
            return ""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._open.append(token_id)
        text = self._tokenizer.decode(self._context + self._open)
        # A character has at most four bytes; a replacement mark behind that many tokens is there to stay.
        if text.endswith(_REPLACEMENT) and len(self._open) < 4:
            return ""
        return self._close(text)

    def finish(self) -> str:
        """What is left when no token follows: the open character's bytes as U+FFFD."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._close(self._tokenizer.decode(self._context + self._open)) if self._open else ""

    def _close(self, text: str) -> str:
        given = len(self._tokenizer.decode(self._context))
        self._context, self._open = self._open, []
        return text[given:]


class StopStrings:
    """Ends a growing text before the first of some strings, wherever the borders of its pieces lie."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the text so far that is certain; what may be the begin of a stop string is held back."""
        if not self._stop or self.found:
            return "" if self.found else text
        text = self._held + text
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        held = max(_open_length(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held


def _open_length(text: str, stop: str) -> int:
    """How many characters at the end of the text begin the stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
