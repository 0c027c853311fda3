"""The plan: what it covers, how it cuts, how it grows; over random trees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkserve.kernels.plan import AttentionPlan, PlanError, PlanOptions, build_plan
from chunkserve.kernels.plan_builder import build_plan_in_python

from .attention_case import Case, tree_case

OPTIONS = st.builds(
    PlanOptions,
    share=st.booleans(),
    min_saved_tokens=st.sampled_from([1, 32, 100]),
    num_workers=st.integers(1, 8),
    heads_per_worker_item=st.sampled_from([1, 3, 32]),
    min_split_tokens=st.sampled_from([16, 64, 256]),
    fixed_split_tokens=st.sampled_from([None, 16, 48, 256]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences in depth-first order of a random tree."""
    levels = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=3))
    private = draw(st.lists(st.integers(0, 70), min_size=1, max_size=10))
    q_lens = draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    case = tree_case(levels, private, q_lens, chunk_size=16, seed=draw(st.integers(0, 3)))
    keep = [i for i, n in enumerate(case.kv_lens) if n > 0]
    return Case(
        paths=[case.paths[i] for i in keep],
        kv_lens=[case.kv_lens[i] for i in keep],
        q_lens=[case.q_lens[i] for i in keep],
        chunk_size=16,
        num_slots=case.num_slots,
    )


@settings(max_examples=150, deadline=None)
@given(cases(), OPTIONS, st.integers(0, 60))
def test_native_planner_equals_its_python_twin(case: Case, options: PlanOptions, present: int):
    arguments = {
        "paths": case.paths,
        "kv_lens": case.kv_lens,
        "q_lens": case.q_lens,
        "kv_present": [min(present, n) for n in case.kv_lens],
        "chunk_size": case.chunk_size,
        "options": options,
    }
    assert build_plan(**arguments).data.tolist() == build_plan_in_python(**arguments).data.tolist()


def _keys_of_rows(plan: AttentionPlan) -> list[list[int]]:
    """Slot * C + offset of the keys that each row sees, in order of position; counted from the items alone."""
    seen: list[dict[int, int]] = [{} for _ in range(plan.num_rows)]
    for i in range(plan.num_items):
        slots = plan.slots_of(i)
        for row in range(plan.item_q_begin[i], plan.item_q_end[i]):
            for key in range(plan.item_kv_len[i]):
                position = int(plan.item_kv_begin[i]) + key
                if position <= plan.row_pos[row]:
                    assert position not in seen[row], "a key is covered twice"
                    seen[row][position] = int(slots[key // plan.chunk_size]) * plan.chunk_size + key % plan.chunk_size
    return [[keys[p] for p in sorted(keys)] for keys in seen]


@settings(max_examples=150, deadline=None)
@given(cases(), OPTIONS)
def test_every_row_sees_each_of_its_keys_once(case: Case, options: PlanOptions):
    keys = _keys_of_rows(case.plan(options))
    row = 0
    for path, kv_len, q_len in zip(case.paths, case.kv_lens, case.q_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            assert keys[row] == [int(path[p // 16]) * 16 + p % 16 for p in range(position + 1)]
            row += 1


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([16, 32, 64]))
def test_fixed_split_pieces_depend_on_the_sequence_alone(case: Case, split: int):
    options = PlanOptions(fixed_split_tokens=split)
    together = case.plan(options)
    for i in range(len(case.paths)):
        alone = build_plan(
            paths=case.paths[i : i + 1],
            kv_lens=case.kv_lens[i : i + 1],
            q_lens=case.q_lens[i : i + 1],
            kv_present=[0],
            chunk_size=16,
            options=options,
        )
        for row in range(case.q_lens[i]):
            ours = int(together.seq_q_indptr[i]) + row
            assert _borders(together, ours) == _borders(alone, row)


def _borders(plan: AttentionPlan, row: int) -> list[tuple[int, int]]:
    items = np.flatnonzero((plan.item_q_begin <= row) & (row < plan.item_q_end))
    pieces = sorted((int(plan.item_kv_begin[i]), int(plan.item_kv_len[i])) for i in items)
    visible = int(plan.row_pos[row]) + 1
    # A piece past the row's own position gives an empty partial, which adds nothing.
    return [(begin, min(length, visible - begin)) for begin, length in pieces if begin < visible]


@settings(max_examples=100, deadline=None)
@given(cases(), OPTIONS, st.integers(1, 80))
def test_a_grown_plan_is_the_plan_of_the_longer_sequences(case: Case, options: PlanOptions, steps: int):
    room = steps // 16 + 2
    # A sequence owns what it will write; the pool grows by that.
    paths = [
        np.append(path[: -(-n // 16)], np.arange(room, dtype=np.int32) + case.num_slots + room * i)
        for i, (path, n) in enumerate(zip(case.paths, case.kv_lens, strict=True))
    ]
    slots = case.num_slots + room * len(paths)
    case = Case(**{**_fields(case), "paths": paths, "q_lens": [1] * len(paths), "num_slots": slots})
    plan = case.plan(options)
    for _ in range(steps):
        case = Case(**{**_fields(case), "kv_lens": [n + 1 for n in case.kv_lens]})
        before = plan.data.copy()
        if not plan.grow({i: int(paths[i][(case.kv_lens[i] - 1) // 16]) for i in plan.full_sequences()}):
            assert np.array_equal(plan.data, before)
            assert (plan.write_offset == 15).any()
            plan = case.plan(options)
        plan.validate(slots)
        new = case.plan(options)
        assert _keys_of_rows(plan) == _keys_of_rows(new)
        assert plan.row_pos.tolist() == new.row_pos.tolist()
        assert plan.write_slot.tolist() == new.write_slot.tolist()
        assert plan.write_offset.tolist() == new.write_offset.tolist()


def test_a_plan_grows_over_chunk_borders_until_its_spare_places_are_used():
    path = np.array([7, 3, 5, 1], np.int32)
    arguments = {"paths": [path], "q_lens": [1], "chunk_size": 16}
    plan = build_plan(kv_lens=[16], kv_present=[15], options=PlanOptions(spare_chunks=2), **arguments)
    for length in range(17, 49):
        assert plan.grow({i: int(path[(length - 1) // 16]) for i in plan.full_sequences()})
    assert plan.slots_of(0).tolist() == [7, 3, 5]
    assert plan.added_chunks == 2
    assert not plan.grow({0: 1})


def test_a_plan_does_not_grow_past_a_fixed_split():
    options = PlanOptions(fixed_split_tokens=32)
    plan = build_plan(
        paths=[np.array([7, 3, 5], np.int32)], kv_lens=[16], q_lens=[1], kv_present=[15], chunk_size=16, options=options
    )
    assert plan.grow({0: 3})
    while not plan.full_sequences():
        assert plan.grow()
    assert plan.row_pos.tolist() == [31]
    assert not plan.grow({0: 5})


def test_a_plan_whose_last_chunk_is_shared_does_not_grow():
    plan = tree_case([(1, 2)], [0, 0], chunk_size=16).plan(PlanOptions(min_saved_tokens=1))
    assert not plan.grow({0: 0, 1: 1})


@pytest.mark.parametrize("q_len", [2, 17])
def test_a_plan_of_prompts_does_not_grow(q_len: int):
    assert not tree_case([], [40], q_len, chunk_size=16).plan().grow()


def _fields(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in ("paths", "kv_lens", "q_lens", "chunk_size", "num_slots")}


def test_a_shared_prefix_becomes_one_item():
    plan = tree_case([(1, 64)], [5] * 32, chunk_size=64).plan()
    assert plan.num_items == 33
    assert (int(plan.item_q_end[0]), int(plan.item_kv_len[0])) == (32, 4096)


def test_fully_shared_rows_need_no_merge():
    plan = tree_case([(1, 8)], [0] * 4, chunk_size=64).plan()
    assert plan.num_items == 1
    assert plan.num_partials == 0


def test_sharing_stops_at_the_last_full_common_chunk():
    # Same slot at depth 1, but the first sequence sees only half of it.
    paths = [np.array([0, 1], np.int32), np.array([0, 1], np.int32)]
    plan = build_plan(paths=paths, kv_lens=[24, 32], q_lens=[1, 1], kv_present=[23, 31], chunk_size=16)
    plan.validate(2)
    shared = plan.item_q_end - plan.item_q_begin == 2
    assert plan.item_kv_len[shared].tolist() == [16]


def test_a_full_hit_appends_nothing_twice():
    case = tree_case([(1, 2)], [0, 0], chunk_size=16)
    plan = case.plan(kv_present=[32, 31])
    assert plan.write_slot.tolist() == [-1, int(case.paths[1][1])]
    assert plan.write_offset.tolist() == [-1, 15]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_write_positions_around_a_chunk_border(length: int):
    path = np.array([7, 3, 5], np.int32)
    plan = build_plan(paths=[path], kv_lens=[length], q_lens=[1], kv_present=[length - 1], chunk_size=16)
    assert plan.write_slot.tolist() == [path[(length - 1) // 16]]
    assert plan.write_offset.tolist() == [(length - 1) % 16]
    assert plan.grow() == (length % 16 != 0)


def test_long_items_are_split_for_all_workers():
    alone = tree_case([], [4096], chunk_size=64).plan(PlanOptions(num_workers=4, min_split_tokens=64))
    assert alone.num_items >= 4
    assert alone.item_kv_len.max() <= 2 * alone.item_kv_len.min()


def test_short_runs_are_read_inside_their_sequences():
    case = tree_case([(1, 1)], [40, 40], chunk_size=16)
    assert case.plan(PlanOptions(min_saved_tokens=32)).num_items == 2
    assert case.plan().num_items == 3


def test_a_short_run_of_many_sequences_is_shared_where_one_of_two_is_not():
    many = tree_case([(1, 1)], [40, 40, 40], chunk_size=16)
    assert many.plan(PlanOptions(min_saved_tokens=32)).num_items == 4


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("item_kv_begin", 0, 16, "gap or an overlap"),
        ("item_partial", 0, -1, "writes the output itself"),
        ("chunk_slots", 0, 1000, "leave the pool"),
        ("row_pos", 0, 1000, "its items end at"),
        ("row_partials", 0, 3, "merges partials"),
    ],
)
def test_validate_names_what_is_broken(field: str, place: int, value: int, message: str):
    case = tree_case([(1, 2)], [5, 6], chunk_size=16)
    plan = case.plan()
    getattr(plan, field)[place] = value
    with pytest.raises(PlanError, match=message):
        plan.validate(case.num_slots)


def test_a_copied_plan_is_the_same_and_a_cut_one_is_refused():
    plan = tree_case([(1, 2)], [5, 6], chunk_size=16).plan()
    copy = AttentionPlan.from_data(plan.data.copy())
    assert copy.chunk_slots.tolist() == plan.chunk_slots.tolist()
    with pytest.raises(PlanError, match="its header says"):
        AttentionPlan.from_data(plan.data[:-1])
    with pytest.raises(PlanError, match="not a plan of version"):
        AttentionPlan.from_data(plan.data[1:])


def test_contradicting_lengths_are_refused():
    for build in (build_plan, build_plan_in_python):
        with pytest.raises(PlanError, match="sequence 0 has 1 new tokens, 33 keys and 2 chunks of 16"):
            build(paths=[np.arange(2, dtype=np.int32)], kv_lens=[33], q_lens=[1], kv_present=[32], chunk_size=16)
    with pytest.raises(PlanError, match=r"have 1, 1, 2 and 1 sequences"):
        build_plan(paths=[np.arange(2, dtype=np.int32)], kv_lens=[3], q_lens=[1, 1], kv_present=[2], chunk_size=16)


def test_no_sequences_make_an_empty_plan():
    plan = build_plan(paths=[], kv_lens=[], q_lens=[], kv_present=[], chunk_size=16)
    plan.validate(1)
    assert (plan.num_rows, plan.num_items) == (0, 0)
