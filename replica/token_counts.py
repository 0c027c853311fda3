"""Which tokens a sequence has, and how often each was generated: what penalties look at. No torch."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T", np.int64, np.float32)


class TokenCounts:
    """Grows with its sequence: a step costs its new tokens, not the whole text.

    Invariant: `token_ids` are distinct; `generated` says how often each follows the prompt, 0 for tokens of the prompt
    alone.

    Args:
        prompt_token_ids: of the sequence.
        with_prompt: whether they are among `token_ids`, or only what is generated.
    """

    def __init__(self, prompt_token_ids: Sequence[int], *, with_prompt: bool) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids)) if with_prompt else []
        self._place = {token_id: at for at, token_id in enumerate(distinct)}
        self._token_ids = np.array(distinct, np.int64)
        self._generated = np.zeros(len(distinct), np.float32)
        self._num_seen = len(prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Distinct ones, U."""
        return len(self._place)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[U] in order of their first occurrence."""
        return self._token_ids[: self.num_tokens]

    @property
    def generated(self) -> NDArray[np.float32]:
        """[U]"""
        return self._generated[: self.num_tokens]

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count what has come since: `token_ids` are the whole sequence."""
        for token_id in token_ids[self._num_seen :]:
            at = self._place.setdefault(token_id, len(self._place))
            if at == len(self._token_ids):
                self._token_ids = _doubled(self._token_ids)
                self._generated = _doubled(self._generated)
            self._token_ids[at] = token_id
            self._generated[at] += 1
        self._num_seen = len(token_ids)


def _doubled(values: NDArray[_T]) -> NDArray[_T]:
    return np.concatenate((values, np.zeros(max(16, len(values)), values.dtype)))
