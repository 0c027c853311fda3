"""Feeds: every event reaches its reader once and in order, and what nobody waits for does not stay."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from chunkserve.replica import token_feed
from chunkserve.replica.protocol import EngineStopped, FinishReason, ReplicaError, TokenEvent
from chunkserve.replica.token_feed import Message, TokenFeeds


def event(number: int, reason: FinishReason | None = None, choice: int = 0) -> TokenEvent:
    return TokenEvent(
        choice=choice,
        text=str(number),
        token_ids=(number,),
        finish_reason=reason,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=number,
    )


def alive() -> None:
    pass


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_feed, "_LINGER_S", 0.05)


async def test_a_step_is_one_message_and_what_piles_up_is_joined() -> None:
    feeds = TokenFeeds(alive)
    done = [feeds.open(name, 1, "ingress") for name in "ab"]
    async with aclosing(feeds.read("ingress")) as messages:
        feeds.deliver([("a", event(1)), ("b", event(2))])
        assert await anext(messages) == [("a", [event(1)]), ("b", [event(2)])]
        feeds.deliver([("a", event(3)), ("b", event(4, "stop"))])
        feeds.deliver([("a", event(5, "length"))])
        assert await anext(messages) == [("a", [event(3), event(5, "length")]), ("b", [event(4, "stop")])]
        assert all(one.done() for one in done)
        assert [feeds.close(name) for name in "ab"] == [0, 0]
        assert [message async for message in messages] == []


async def test_events_wait_for_their_reader_and_go_to_no_other() -> None:
    feeds = TokenFeeds(alive)
    feeds.open("a", 1, "one")
    feeds.open("b", 1, "two")
    feeds.deliver([("a", event(1, "stop")), ("b", event(2, "stop")), ("unknown", event(3))])
    feeds.close("a"), feeds.close("b")
    assert [message async for message in feeds.read("two")] == [[("b", [event(2, "stop")])]]
    assert [message async for message in feeds.read("one")] == [[("a", [event(1, "stop")])]]


async def test_a_request_is_done_when_each_choice_is_and_says_what_was_left() -> None:
    feeds = TokenFeeds(alive)
    done = feeds.open("a", 2, "ingress")
    with pytest.raises(ReplicaError, match="in use"):
        feeds.open("a", 1, "ingress")
    feeds.deliver([("a", event(1, "stop", choice=1))])
    assert not done.done()
    assert feeds.close("a") == 1
    feeds.deliver([("a", event(2, "stop"))])
    assert [message async for message in feeds.read("ingress")] == [[("a", [event(1, "stop", choice=1)])]]


@pytest.mark.parametrize("started", [False, True])
async def test_an_engine_that_dies_before_the_first_token_is_told_to_the_call_not_to_the_reader(started: bool) -> None:
    def dead() -> None:
        raise EngineStopped("gone")

    feeds = TokenFeeds(dead)
    done = feeds.open("a", 1, "ingress")
    if started:
        feeds.deliver([("a", event(1))])
    feeds.deliver([("a", event(2, "error"))])
    feeds.close("a")
    told = [one for message in [m async for m in feeds.read("ingress")] for _, events in message for one in events]
    if started:
        assert await done is None
        assert told == [event(1), event(2, "error")]
    else:
        with pytest.raises(EngineStopped):
            await done
        assert told == []


async def test_a_second_reader_takes_over() -> None:
    feeds = TokenFeeds(alive)
    feeds.open("a", 1, "ingress")
    async with aclosing(feeds.read("ingress")) as first, aclosing(feeds.read("ingress")) as second:
        lost = asyncio.create_task(_next(first))
        await asyncio.sleep(0)
        got = asyncio.create_task(_next(second))
        await asyncio.sleep(0)
        feeds.deliver([("a", event(1, "stop"))])
        assert await got == [("a", [event(1, "stop")])]
        assert await lost is None


async def _next(messages: AsyncGenerator[Message, None]) -> Message | None:
    return await anext(messages, None)


async def test_a_reader_that_is_gone_leaves_nothing() -> None:
    feeds = TokenFeeds(alive)
    feeds.open("a", 1, "ingress")
    feeds.deliver([("a", event(1, "stop"))])
    feeds.close("a")
    assert len([message async for message in feeds.read("ingress")]) == 1
    assert not feeds._feeds
