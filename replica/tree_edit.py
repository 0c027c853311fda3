"""What the leader tells the other ranks about the sequences of a replica, as bytes. No torch.

Schedules, places in the tree, evictions and copies follow from these edits and from the sampled tokens by the same code
on every rank (replica/step_core.py), so that nothing of them has to travel; digests prove that they are equal.
"""

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from .protocol import GrammarSpec, Request, SamplingParams

# kind, length of the body
_HEAD = struct.Struct("<BI")
# arrival, n, max_tokens, top_k, ignore_eos, prefix_cache, temperature, top_p, min_p, and presence, frequency and
# repetition penalty
_JOIN = struct.Struct("<QIQQ??dddddd")
_SEED_BYTES = 16
_COUNT = struct.Struct("<I")


class EditError(ValueError):
    """Bytes that are no edits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A request's choices come into the queue.

    arrival: of its first choice; the others follow.
    request: what ranks need to know of it: no stop strings, no log-probabilities, no field that a grammar came in.
    seed: of its first choice; the others follow.
    """

    arrival: int
    request: Request
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A sequence goes, for a reason that only the leader knows: cancelled, or a stop string."""

    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """All chunks that nobody uses are forgotten."""


TreeEdit = Join | Leave | Clear


def encode(edit: TreeEdit) -> bytes:
    """An edit as bytes, for EditReader."""
    match edit:
        case Join():
            body = _join_bytes(edit)
            kind = b"J"
        case Leave():
            body = edit.arrival.to_bytes(8, "little")
            kind = b"L"
        case Clear():
            body, kind = b"", b"C"
    return _HEAD.pack(kind[0], len(body)) + body


class EditReader:
    """Cuts a stream of bytes, in whatever pieces it comes, into edits."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> Iterator[TreeEdit]:
        """The edits that are complete with this piece, in order.

        Raises:
            EditError: the stream is broken.
        """
        self._bytes += piece
        while len(self._bytes) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._bytes)
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield _decode(chr(kind), body)


def _decode(kind: str, body: bytes) -> TreeEdit:
    try:
        match kind:
            case "J":
                return _join(body)
            case "L" if len(body) == 8:
                return Leave(arrival=int.from_bytes(body, "little"))
            case "C" if not body:
                return Clear()
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise EditError(f"an edit of kind {kind!r} with {len(body)} bytes is broken: {error}") from error
    raise EditError(f"no edit has kind {kind!r} and {len(body)} bytes")


def _join_bytes(edit: Join) -> bytes:
    request, sampling = edit.request, edit.request.sampling
    salt = request.cache_salt.encode()
    spec = sampling.grammar
    grammar = f"{spec.kind} {spec.text}".encode() if spec is not None else b""
    return b"".join(
        (
            _JOIN.pack(
                edit.arrival, request.n, sampling.max_tokens, sampling.top_k, sampling.ignore_eos,
                request.prefix_cache,
                sampling.temperature, sampling.top_p, sampling.min_p,
                sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty,
            ),
            edit.seed.to_bytes(_SEED_BYTES, "little", signed=True),
            _COUNT.pack(len(salt)), salt,
            _COUNT.pack(len(sampling.stop_token_ids)), array("I", sampling.stop_token_ids).tobytes(),
            _COUNT.pack(len(sampling.logit_bias)),
            array("I", (token for token, _ in sampling.logit_bias)).tobytes(),
            array("d", (bias for _, bias in sampling.logit_bias)).tobytes(),
            _COUNT.pack(len(grammar)), grammar,
            array("I", request.prompt_token_ids).tobytes(),
        )
    )  # fmt: skip


def _join(body: bytes) -> Join:
    arrival, n, max_tokens, top_k, ignore_eos, prefix_cache, *numbers = _JOIN.unpack_from(body)
    temperature, top_p, min_p, presence, frequency, repetition = numbers
    rest = _Bytes(body, _JOIN.size)
    seed = int.from_bytes(rest.take(_SEED_BYTES), "little", signed=True)
    salt = rest.take(rest.count()).decode()
    stops = array("I", rest.take(4 * rest.count()))
    num_bias = rest.count()
    biased, bias = array("I", rest.take(4 * num_bias)), array("d", rest.take(8 * num_bias))
    grammar = _grammar(rest.take(rest.count()).decode())
    tokens = array("I", rest.take())
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition,
        logit_bias=tuple(zip(biased, bias, strict=True)), stop_token_ids=tuple(stops), ignore_eos=ignore_eos,
        grammar=grammar,
    )  # fmt: skip
    request = Request(
        request_id=f"arrival {arrival}", prompt_token_ids=tuple(tokens), sampling=sampling, n=n, cache_salt=salt,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    return Join(arrival=arrival, request=request, seed=seed)


def _grammar(text: str) -> GrammarSpec | None:
    match text.partition(" "):
        case "", "", "":
            return None
        case "json_schema" | "regex" as kind, " ", rest:
            return GrammarSpec(kind=kind, text=rest, param="")
    raise ValueError(f"no grammar has kind {text[:20]!r}")


class _Bytes:
    """Reads a body from front to end."""

    def __init__(self, body: bytes, at: int) -> None:
        self._body = body
        self._at = at

    def take(self, length: int | None = None) -> bytes:
        """The next bytes; all that are left without a length. Raises ValueError if there are fewer."""
        end = len(self._body) if length is None else self._at + length
        if end > len(self._body):
            raise ValueError(f"{end - len(self._body)} bytes are missing")
        piece, self._at = self._body[self._at : end], end
        return piece

    def count(self) -> int:
        count: int
        (count,) = _COUNT.unpack(self.take(_COUNT.size))
        return count
