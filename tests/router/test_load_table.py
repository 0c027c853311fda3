import random

import numpy as np
import pytest

from chunkserve.replica.protocol import RoutingReport, StepTime
from chunkserve.router.load_table import STALE_AFTER_S, LoadTable


def report_at(
    taken_at_s: float, backlog_s: float = 0.0, requests: int = 0, computed: tuple[int, int] = (0, 0)
) -> RoutingReport:
    return RoutingReport(
        epoch=0,
        taken_at_s=taken_at_s,
        backlog_s=backlog_s,
        running_sequences=requests,
        waiting_sequences=0,
        chunks_total=100,
        chunks_in_use=0,
        chunks_retained=0,
        step=StepTime(),
        max_step_tokens=512,
        chunk_identity="x",
        computed_tokens=computed[0],
        computed_steps=computed[1],
    )


def table_of(rows: int) -> LoadTable:
    table = LoadTable()
    for row in range(rows):
        table.add_replica(row)
    return table


ROWS = np.arange(2)


def test_a_request_is_work_until_its_first_token_and_counts_until_its_end() -> None:
    table = table_of(2)
    table.reserve("a", 1, 0.5, now_s=1.0)
    assert table.work_s(ROWS, 1.0).tolist() == [0.0, 0.5]
    table.prefilled("a")
    table.prefilled("a")
    assert table.work_s(ROWS, 1.0).tolist() == [0.0, 0.0]
    assert table.num_requests(ROWS, 1.0).tolist() == [0, 1]
    table.release("a")
    table.release("a")
    assert table.num_requests(ROWS, 1.0).tolist() == [0, 0]
    table.check()


def given(table: LoadTable, rows: int = 2) -> list[list[float]]:
    return [column.tolist() for column in table.given(np.arange(rows))]


def test_what_was_given_counts_as_sent_then_as_waiting_then_as_done_and_fades() -> None:
    table = table_of(2)
    table.report(0, report_at(0.0))
    table.reserve("a", 0, 2.0, now_s=1.0, tokens=200, steps=2)
    assert given(table) == [[200, 0], [2, 0], [0, 0]]
    table.report(0, report_at(2.0, backlog_s=2.0))
    assert given(table) == [[0, 0], [0, 0], [2, 0]]
    table.prefilled("a")
    table.release("a")
    table.report(0, report_at(3.0, computed=(210, 3)))
    assert given(table) == [[210, 0], [3, 0], [0, 0]]
    table.report(1, report_at(63.0, computed=(1000, 10)))
    assert given(table)[0] == pytest.approx([210 / np.e, 0]), "what it did before its first report is not known"


def test_what_moves_was_given_to_the_second_and_what_is_cancelled_to_nobody() -> None:
    table = table_of(2)
    table.reserve("a", 0, 2.0, now_s=1.0, tokens=200, steps=2)
    table.reserve("a", 1, 1.0, now_s=1.0, tokens=100, steps=1)
    assert given(table) == [[0, 100], [0, 1], [0, 0]]
    table.release("a")
    table.report(1, report_at(2.0))
    assert given(table) == [[0, 0], [0, 0], [0, 0]]


def test_a_new_replica_begins_with_what_others_were_given() -> None:
    table = table_of(2)
    table.reserve("a", 0, 2.0, now_s=0.0, tokens=200, steps=2)
    table.add_replica(2)
    assert given(table, 3)[:2] == [[200, 0, 100], [2, 0, 1]]
    assert table.scale == 1.0


def test_what_other_routers_send_between_reports_is_taken_to_be_like_our_own() -> None:
    table = table_of(2)
    table.report(0, report_at(0.0))
    for number in range(100):
        table.reserve(f"{number}", 0, 0.5, now_s=0.5, tokens=50, steps=1)
        table.prefilled(f"{number}")
        table.release(f"{number}")
    assert table.scale == 1.0
    table.report(0, report_at(1.0, computed=(5000, 100)))
    assert table.scale == 1.0
    table.report(0, report_at(1.0 + 1e-6, computed=(20_000, 412)))
    assert table.scale == pytest.approx(4.0), "of four prompts that were computed, one was ours"
    table.reserve("next", 1, 0.5, now_s=1.5, tokens=50, steps=1)
    assert table.work_s(ROWS, 1.5)[1] == pytest.approx(4 * 0.5)
    assert table.num_requests(ROWS, 1.5).tolist() == [0, 4]
    assert [column[1] for column in given(table)] == pytest.approx([200, 4, 0])


def test_a_report_covers_what_was_sent_before_it() -> None:
    table = table_of(2)
    table.reserve("before", 0, 2.0, now_s=10.0)
    table.reserve("after", 0, 0.25, now_s=11.0)
    table.report(0, report_at(10.5, backlog_s=3.0, requests=4))
    assert table.work_s(ROWS, 11.5).tolist() == [3.0 - 1.0 + 0.25, 0.0]
    assert table.num_requests(ROWS, 11.5).tolist() == [5, 0]
    table.release("before")
    table.prefilled("after")
    assert table.work_s(ROWS, 11.5).tolist() == [2.0, 0.0]
    table.check()


def test_reports_run_dry_and_grow_stale() -> None:
    table = table_of(2)
    table.report(0, report_at(10.0, backlog_s=2.0, requests=9))
    table.reserve("a", 0, 7.0, now_s=10.5)
    assert table.work_s(ROWS, 13.0)[0] == 7.0
    late_s = 10.0 + STALE_AFTER_S + 1.0
    assert table.work_s(ROWS, late_s)[0] == 7.0
    assert table.num_requests(ROWS, late_s)[0] == 1


def test_an_older_report_changes_nothing() -> None:
    table = table_of(2)
    table.report(0, report_at(10.0, backlog_s=1.0))
    table.report(0, report_at(9.0, backlog_s=50.0))
    assert table.work_s(ROWS, 10.0)[0] == 1.0


def test_a_second_reservation_moves_the_request() -> None:
    table = table_of(2)
    table.reserve("a", 0, 1.0, now_s=0.0, anchor=b"x")
    table.reserve("a", 1, 1.0, now_s=0.0, anchor=b"x")
    assert table.work_s(ROWS, 0.0).tolist() == [0.0, 1.0]
    assert table.num_sharers(ROWS, b"x").tolist() == [0, 1]
    table.check()


def test_a_dead_replica_takes_its_load_with_it() -> None:
    table = table_of(2)
    table.reserve("a", 0, 1.0, now_s=0.0)
    table.remove_replica(0)
    table.release("a")
    table.add_replica(0)
    assert table.work_s(ROWS, 0.0).tolist() == [0.0, 0.0]
    table.check()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ten_thousand_cancels_leave_exactly_nothing(seed: int) -> None:
    draw = random.Random(seed)
    table = table_of(3)
    keys: list[str] = []
    for number in range(10_000):
        now_s = number * 0.01
        keys.append(f"{number}")
        table.reserve(keys[-1], draw.randrange(3), draw.random() / 3, now_s, anchor=bytes([draw.randrange(4)]))
        if draw.random() < 0.3:
            table.prefilled(draw.choice(keys))
        if draw.random() < 0.1:
            table.report(draw.randrange(3), report_at(now_s - draw.random(), draw.random(), draw.randrange(9)))
        while keys and draw.random() < 0.6:
            table.release(keys.pop(draw.randrange(len(keys))))
        if number % 1000 == 0:
            table.check()
    for key in keys:
        table.release(key)
    table.check()
    assert table.num_open == 0
    assert not table._own_us.any()
    assert not table._since_us.any()
    assert not table._in_flight.any()
    assert not table._sent_since.any()
    assert not table._sharers
