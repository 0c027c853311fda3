"""Which beginnings running sequences share now. No torch."""

from collections import Counter
from collections.abc import Iterable

from .prefix_tree import Node
from .protocol import HotPrefix
from .sequence import Sequence


def hot_prefixes(sequences: Iterable[Sequence], limit: int = 5) -> tuple[HotPrefix, ...]:
    """Prefixes of at least two sequences, those first that save most reads per step.

    Reads each sequence's path once, as it is at that moment: any thread may call it.
    """
    paths = [tuple(sequence.path) for sequence in sequences]
    sharers = Counter(node.node_id for path in paths for node in path)
    found: dict[int, HotPrefix] = {}
    for path in paths:
        tokens, name = 0, ""
        for at, node in enumerate(path):
            count = sharers[node.node_id]
            if count < 2:
                break
            tokens += len(node.tokens)
            name = _name(node) or name
            # A prefix ends where somebody leaves it.
            if at + 1 == len(path) or sharers[path[at + 1].node_id] < count:
                found[node.node_id] = HotPrefix(name=name, tokens=tokens, sharers=count)
    return tuple(sorted(found.values(), key=lambda hot: (1 - hot.sharers) * hot.tokens)[:limit])


def _name(node: Node) -> str:
    return node.digest.hex() if node.digest is not None else ""
