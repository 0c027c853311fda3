import random

import numpy as np
import pytest

from chunkserve.replica.protocol import RoutingReport, StepTime
from chunkserve.router.load_table import STALE_AFTER_S, LoadTable


def report_at(taken_at_s: float, backlog_s: float = 0.0, requests: int = 0) -> RoutingReport:
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


def test_what_was_sent_fades_and_moves_with_its_request() -> None:
    table = table_of(2)

    def sent() -> list[list[float]]:
        return [column.tolist() for column in table.sent(ROWS)]

    table.reserve("a", 0, 2.0, now_s=0.0, tokens=200, steps=2)
    table.prefilled("a")
    table.release("a")
    assert sent() == [[200, 0], [2, 0]]
    table.reserve("b", 1, 0.5, now_s=60.0, tokens=50, steps=1)
    assert sent()[0] == pytest.approx([200 / np.e, 50])
    table.reserve("b", 0, 0.75, now_s=60.0, tokens=75, steps=1)
    assert sent()[0] == pytest.approx([200 / np.e + 75, 0])
    assert sent()[1] == pytest.approx([2 / np.e + 1, 0])


def test_a_new_replica_begins_with_what_others_were_sent() -> None:
    table = table_of(2)
    table.reserve("a", 0, 2.0, now_s=0.0, tokens=200, steps=2)
    table.add_replica(2)
    assert [column.tolist() for column in table.sent(np.arange(3))] == [[200, 0, 100], [2, 0, 1]]


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
