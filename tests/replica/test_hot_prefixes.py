from chunkserve.replica.hot_prefixes import hot_prefixes
from chunkserve.replica.prefix_tree import Node
from chunkserve.replica.protocol import HotPrefix, Request, SamplingParams
from chunkserve.replica.sequence import Sequence

C = 4


def node(number: int, tokens: int = C) -> Node:
    digest = bytes([number]) * 16 if tokens == C else None
    return Node(node_id=number, slot=number, parent=None, tokens=[0] * tokens, digest=digest)


def sequences(*paths: list[Node]) -> list[Sequence]:
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    return [
        Sequence(request=request, choice=0, arrival=at, seed=0, token_ids=[1], path=path)
        for at, path in enumerate(paths)
    ]


def test_prefixes_end_where_somebody_leaves_them() -> None:
    a, b, c = node(1), node(2), node(3)
    found = hot_prefixes(sequences([a, b, c, node(4)], [a, b, c, node(5, 2)], [a, node(6)], [node(7)]))
    assert found == (
        HotPrefix(name="03" * 16, tokens=3 * C, sharers=2),
        HotPrefix(name="01" * 16, tokens=C, sharers=3),
    )


def test_a_part_of_a_chunk_counts_and_has_the_name_of_the_chunk_before() -> None:
    a, part = node(1), node(2, 3)
    assert hot_prefixes(sequences([a, part], [a, part])) == (HotPrefix(name="01" * 16, tokens=C + 3, sharers=2),)
    assert hot_prefixes(sequences([part], [part])) == (HotPrefix(name="", tokens=3, sharers=2),)


def test_only_the_best_are_told() -> None:
    pairs = [path for n in range(1, 9) for path in [[node(n)] * 1] * 2]
    assert len(hot_prefixes(sequences(*pairs), limit=3)) == 3
    assert hot_prefixes(sequences([node(1)], [node(2)], [])) == ()
