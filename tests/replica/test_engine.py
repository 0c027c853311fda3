"""The engine with a model whose keys prove themselves: every choice gets the text that it would get alone."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import pytest

from chunkserve.replica.build import build_engine
from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.engine import Engine, EngineConfig, build_tree
from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import (
    EngineStopped,
    ReplicaOverloaded,
    Request,
    RequestRefused,
    RoutingReport,
    SamplingParams,
    StepTime,
    TokenEvent,
)
from chunkserve.replica.reporter import RoutingReporter
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.replica.tree_edit import TreeEdit

pytestmark = pytest.mark.model

C = 16
VOCAB = 97


class Bench:
    """An engine that is stepped by hand, and what came out of it."""

    def __init__(self, tokenizer: Tokenizer, reporter: RoutingReporter | None = None, **options: object) -> None:
        defaults: dict[str, object] = {
            "chunk_size": C,
            "num_slots": 64,
            "chunk_bytes": 1,
            "max_sequence_tokens": 512,
            "max_running": 8,
            "max_step_tokens": 64,
            "max_waiting": 100,
        }
        config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
        self.runner = FakeModelRunner(vocab_size=VOCAB, num_slots=config.num_slots, chunk_size=C)
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.engine = Engine(
            runner=self.runner, tokenizer=tokenizer, config=config, emit=self.take, reporter=reporter,
            tree=build_tree(config, reporter),
        )  # fmt: skip

    def take(self, events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def turn(self) -> bool:
        self.engine._take_messages(wait=False)
        busy = self.engine.step()
        self.engine.check()
        return busy

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.turn():
                return
        raise AssertionError("the engine does not come to an end")

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [t for event in self.events[request_id] if event.choice == choice for t in event.token_ids]

    def expected(self, request: Request) -> list[int]:
        token_ids = list(request.prompt_token_ids)
        for _ in range(request.sampling.max_tokens):
            token_ids.append(self.runner.next_token(request.cache_salt, token_ids))
        return token_ids[len(request.prompt_token_ids) :]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Bench]:
    return lambda **options: Bench(tokenizer, **options)


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    n: int = 1,
    salt: str = "",
    prefix_cache: bool = True,
    **sampling: object,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
        n=n,
        cache_salt=salt,
        prefix_cache=prefix_cache,
    )


def assert_right(bench: Bench, requests: list[Request]) -> None:
    for one in requests:
        for choice in range(one.n):
            events = [event for event in bench.events[one.request_id] if event.choice == choice]
            assert bench.tokens(one.request_id, choice) == bench.expected(one), one.request_id
            assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
            assert events[-1].finish_reason == "length"
            assert events[-1].completion_tokens == one.sampling.max_tokens


def test_shared_prefix_is_computed_once_and_kept_once(make: Callable[..., Bench]) -> None:
    bench = make(num_slots=200, max_running=16, max_step_tokens=256)
    prefix = list(range(10 * C))
    requests = [request(f"r{i}", [*prefix, 90, i, 3], max_tokens=4) for i in range(16)]
    for one in requests:
        bench.engine.submit(one)
    peak = 0
    while bench.turn():
        peak = max(peak, bench.engine.load().chunks_in_use)
    assert_right(bench, requests)
    assert peak == 10 + 16, "one prefix and sixteen tails"
    load = bench.engine.load()
    # The prefix once; of each tail, the first token `90` may be copied from another's.
    assert 10 * C + 16 * 2 <= load.computed_prompt_tokens <= 10 * C + 16 * 3
    assert load.cached_prompt_tokens + load.computed_prompt_tokens == 16 * (10 * C + 3)
    assert [bench.events[f"r{i}"][-1].cached_tokens >= 10 * C for i in range(16)] == [False] + [True] * 15


def test_a_request_that_opts_out_shares_with_its_own_choices_alone_and_leaves_nothing(
    make: Callable[..., Bench],
) -> None:
    bench = make(max_step_tokens=256)
    prompt = list(range(4 * C))
    usual, private = request("usual", prompt), request("private", prompt, n=3, prefix_cache=False)
    other = request("other", prompt, prefix_cache=False)
    bench.engine.submit(usual)
    bench.run()
    retained = bench.engine.load().chunks_retained
    for one in (private, other):
        bench.engine.submit(one)
    peak = 0
    while bench.turn():
        peak = max(peak, bench.engine.load().chunks_in_use)
    assert_right(bench, [usual, private, other])
    assert peak == (4 + 3) + (4 + 1), "the choices share their prompt, and the other request has its own"
    assert bench.events["private"][0].cached_tokens == bench.events["other"][0].cached_tokens == 0
    assert bench.engine.load().chunks_retained == retained
    assert bench.engine.load().chunks_in_use == 0
    # Nor does anybody find what a request that is not done yet has computed.
    bench.engine.submit(request("long", [7] * (3 * C), max_tokens=40, prefix_cache=False))
    for _ in range(3):
        bench.turn()
    bench.engine.submit(request("later", [7] * (3 * C)))
    bench.run()
    assert bench.events["later"][0].cached_tokens == 0


def test_without_sharing_everything_is_computed(make: Callable[..., Bench]) -> None:
    bench = make(prefix_sharing=False)
    requests = [request(f"r{i}", [*range(3 * C), i]) for i in range(4)]
    for one in requests:
        bench.engine.submit(one)
    bench.run()
    assert_right(bench, requests)
    assert bench.engine.load().cached_prompt_tokens == 0
    assert bench.engine.load().chunks_retained == 0


def test_more_requests_than_the_pool_holds_all_finish(make: Callable[..., Bench]) -> None:
    bench = make(num_slots=6 * 6, max_running=24, max_step_tokens=64)
    requests = [request(f"r{i}", [i] * (5 * C), max_tokens=C) for i in range(24)]
    for one in requests:
        bench.engine.submit(one)
    bench.run()
    assert_right(bench, requests)


def test_preempted_sequences_lose_no_token(make: Callable[..., Bench]) -> None:
    bench = make(num_slots=32, max_running=8)
    requests = [request(f"r{i}", [i, i + 1, 5], max_tokens=6 * C) for i in range(8)]
    for one in requests:
        bench.engine.submit(one)
    bench.run()
    assert_right(bench, requests)
    assert bench.engine.load().preemptions > 0
    # Only the first admission counts: nothing of these prompts was there.
    assert bench.engine.load().cached_prompt_tokens == 0


def test_two_that_need_most_of_the_pool_both_finish(make: Callable[..., Bench]) -> None:
    bench = make(num_slots=32)
    requests = [request(f"r{i}", [i] * (18 * C), max_tokens=2 * C) for i in range(2)]
    for one in requests:
        bench.engine.submit(one)
    bench.run()
    assert_right(bench, requests)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gets_the_text_that_it_gets_alone(make: Callable[..., Bench], seed: int) -> None:
    rng = random.Random(seed)
    bench = make(
        num_slots=rng.choice([33, 40, 80]),
        max_running=rng.choice([3, 8]),
        max_step_tokens=rng.choice([8, 20, 64]),
        retain_prefixes=rng.random() < 0.8,
        prefix_sharing=rng.random() < 0.9,
    )
    stems = [[rng.randrange(4) for _ in range(rng.choice([0, 5, C - 1, C, C + 1, 3 * C]))] for _ in range(4)]
    requests, cancelled = [], set()
    for i in range(60):
        prompt = [*rng.choice(stems), *[rng.randrange(2) for _ in range(rng.randrange(1, 2 * C))]]
        one = request(
            f"r{i}", prompt, rng.randrange(1, 40), n=rng.choice([1, 1, 1, 3]), salt=rng.choice(["", "", "a"]),
            prefix_cache=rng.random() < 0.8,
        )  # fmt: skip
        requests.append(one)
        bench.engine.submit(one)
        for _ in range(rng.randrange(4)):
            bench.turn()
        if rng.random() < 0.2:
            name = f"r{rng.randrange(i + 1)}"
            cancelled.add(name)
            bench.engine.cancel(name)
    bench.run()
    assert_right(bench, [one for one in requests if one.request_id not in cancelled])
    for name in cancelled:
        ends = [event.finish_reason for event in bench.events[name] if event.finish_reason]
        assert set(ends) <= {"cancelled", "length"}
    assert bench.engine.load().chunks_in_use == 0
    assert bench.engine.load().running_sequences == bench.engine.load().waiting_sequences == 0


def test_a_long_prompt_is_computed_beside_running_streams(make: Callable[..., Bench]) -> None:
    bench = make(max_step_tokens=16)
    bench.engine.submit(request("short", [1, 2, 3], max_tokens=30))
    bench.turn()
    bench.engine.submit(request("long", [7] * 200, max_tokens=1))
    bench.turn()
    before = len(bench.tokens("short"))
    while not bench.events["long"]:
        bench.turn()
    assert len(bench.tokens("short")) - before >= 200 // 16, "the stream went on, a token per step"


def test_cancelled_in_queue_in_prefill_and_in_decode(make: Callable[..., Bench]) -> None:
    bench = make(max_running=2, max_step_tokens=8)
    for name, prompt in (("decode", [1, 2]), ("prefill", [3] * 100), ("queue", [4] * 10)):
        bench.engine.submit(request(name, prompt, max_tokens=50))
    for _ in range(3):
        bench.turn()
    assert bench.events["decode"]
    assert not bench.events["prefill"]
    for name in ("decode", "prefill", "queue"):
        bench.engine.cancel(name)
        bench.engine.cancel(name)
    bench.engine.cancel("never heard of")
    assert not bench.turn()
    assert bench.engine.load().chunks_in_use == 0
    assert bench.engine.load().cancelled_requests == 3
    assert {events[-1].finish_reason for events in bench.events.values()} == {"cancelled"}


def test_prefix_of_a_cancelled_prompt_is_right_for_the_next(make: Callable[..., Bench]) -> None:
    bench = make(max_step_tokens=8)
    bench.engine.submit(request("first", list(range(90)), max_tokens=4))
    second = request("second", [*range(80), 5], max_tokens=4)
    bench.engine.submit(second)
    for _ in range(4):
        bench.turn()
    bench.engine.cancel("first")
    bench.run()
    assert_right(bench, [second])


def test_what_can_never_fit_is_refused_with_the_limit(make: Callable[..., Bench]) -> None:
    bench = make()
    with pytest.raises(
        RequestRefused, match=r"prompt has 510 tokens and max_tokens is 3.* 512 \(max_sequence_tokens\)"
    ):
        bench.engine.submit(request("r", [1] * 510, max_tokens=3))
    with pytest.raises(RequestRefused, match="no tokens"):
        bench.engine.submit(request("r", []))
    with pytest.raises(ValueError, match="raise kv_pool_bytes"):
        make(num_slots=31)


def test_a_full_queue_is_overload(make: Callable[..., Bench]) -> None:
    bench = make(max_waiting=2, max_running=1)
    for i in range(3):
        bench.engine.submit(request(f"r{i}", [i]))
    with pytest.raises(ReplicaOverloaded, match="max_waiting_requests"):
        bench.engine.submit(request("r3", [3]))
    bench.run()
    bench.engine.submit(request("r4", [4]))


def test_request_id_in_use_is_an_error_of_the_newcomer(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.submit(request("r", [1]))
    bench.engine.submit(request("r", [2]))
    bench.run()
    assert [e.finish_reason for e in bench.events["r"] if e.finish_reason] == ["error", "length"]
    assert bench.engine.load().waiting_sequences == 0


def test_stop_token_ends_without_text(make: Callable[..., Bench]) -> None:
    bench = make()
    plain = request("plain", [1, 2, 3], max_tokens=20)
    bench.engine.submit(plain)
    bench.run()
    stop_at = bench.tokens("plain")[4]
    first = bench.tokens("plain").index(stop_at)
    bench.engine.submit(request("stopped", [1, 2, 3], max_tokens=20, stop_token_ids=(stop_at,)))
    bench.run()
    assert bench.tokens("stopped") == bench.tokens("plain")[: first + 1]
    assert bench.events["stopped"][-1].finish_reason == "stop"
    assert bench.events["stopped"][-1].text == ""


def test_engine_thread_answers_stops_and_refuses_afterwards(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    done = threading.Event()

    def take(events: list[tuple[str, TokenEvent]]) -> None:
        bench.take(events)
        if events[-1][1].finish_reason:
            done.set()

    bench.engine._emit = take
    bench.engine.start()
    bench.engine.ping(timeout_s=5)
    bench.engine.submit(request("r", [1, 2]))
    assert done.wait(5)
    bench.engine.stop()
    with pytest.raises(EngineStopped):
        bench.engine.submit(request("r", [1, 2]))
    with pytest.raises(EngineStopped):
        bench.engine.ping(timeout_s=1)


def test_a_fault_in_a_step_ends_everything_with_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tokenizer)

    def fail(*_: object) -> None:
        raise RuntimeError("the model broke")

    monkeypatch.setattr(bench.runner, "run", fail)
    done = threading.Semaphore(0)
    bench.engine._emit = lambda events: (bench.take(events), [done.release() for _ in events])[0]
    for i in range(3):
        bench.engine.submit(request(f"r{i}", [i]))
    bench.engine.start()
    for _ in range(3):
        assert done.acquire(timeout=5)
    assert all(events[-1].finish_reason == "error" for events in bench.events.values())
    assert "the model broke" in (bench.events["r0"][-1].error or "")
    with pytest.raises(EngineStopped, match="the model broke"):
        bench.engine.ping(timeout_s=1)


class Stuck:
    """A bench on its own thread whose next step does not end until it is let go."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        self.bench = Bench(tokenizer, **options)
        self.entered, self.go = threading.Event(), threading.Event()
        run = self.bench.runner.run

        def slow(*args: object) -> object:
            self.entered.set()
            assert self.go.wait(20)
            return run(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(self.bench.runner, "run", slow)


def test_the_age_of_the_last_step_does_not_count_idle_time(tokenizer: Tokenizer, monkeypatch) -> None:
    stuck = Stuck(tokenizer, monkeypatch)
    engine, now_s = stuck.bench.engine, [0.0]
    engine._clock = lambda: now_s[0]
    engine.start()
    engine.ping(timeout_s=5)
    now_s[0] = 100.0
    engine.submit(request("r", [1, 2]))
    assert stuck.entered.wait(5)
    assert engine.load().last_step_age_s == 0.0
    now_s[0] = 107.0
    assert engine.load().last_step_age_s == 7.0
    stuck.go.set()
    engine.stop()


def test_a_stalled_loop_is_logged_once_and_so_is_its_end(tokenizer: Tokenizer, monkeypatch, caplog) -> None:
    stuck = Stuck(tokenizer, monkeypatch, stall_warning_s=0.02)
    engine = stuck.bench.engine
    engine.start()
    time.sleep(0.1)
    assert "stalled" not in caplog.text, "an idle engine is not stalled"
    engine.submit(request("r", [1, 2], max_tokens=2))
    deadline_s = time.monotonic() + 10
    while "stalled" not in caplog.text and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.1)
    stuck.go.set()
    while "moves again" not in caplog.text and time.monotonic() < deadline_s:
        time.sleep(0.01)
    engine.stop()
    messages = [record.getMessage().split(" age_s")[0].split(" steps")[0] for record in caplog.records]
    assert messages[:2] == ["engine stalled", "engine moves again"]
    assert "running=1 waiting=0" in caplog.text


@pytest.mark.parametrize("num_slots", [32, 200], ids=["full_pool", "roomy_pool"])
def test_short_prompts_do_not_starve_a_long_one(make: Callable[..., Bench], num_slots: int) -> None:
    bench = make(num_slots=num_slots, max_running=8, max_step_tokens=24)
    for i in range(8):
        bench.engine.submit(request(f"before {i}", [i, 9], max_tokens=30))
    bench.turn()
    long = request("long", [7] * (24 * C), max_tokens=3)
    bench.engine.submit(long)
    steps = 0
    while not bench.tokens("long"):
        # There is always one more that would fit.
        bench.engine.submit(request(f"short {steps}", [steps % 90, steps // 90, 3], max_tokens=30, salt=str(steps)))
        bench.turn()
        steps += 1
        assert steps < 150, "the long prompt does not get its turn"
    bench.run()
    assert_right(bench, [long])


def test_long_prompts_do_not_starve_a_short_one(make: Callable[..., Bench]) -> None:
    bench = make(num_slots=200, max_running=8, max_step_tokens=64, max_waiting=1000)
    size = 20 * C
    for i in range(3):
        bench.engine.submit(request(f"before {i}", [i] * size, max_tokens=20))
    bench.engine.submit(request("short", [91, 92, 93], max_tokens=3))
    steps = 0
    while not bench.tokens("short"):
        bench.engine.submit(request(f"after {steps}", [10 + steps % 80] * size, max_tokens=20, salt=str(steps)))
        bench.turn()
        steps += 1
        # What was there before it, and a few tokens of each step for those that stream.
        assert steps <= 3 * size // (64 - 8) + 2, "those that came later were served first"


def test_a_replica_with_simulated_steps_takes_their_time_and_says_what_the_fake_model_says(small_model) -> None:
    events: list[tuple[str, TokenEvent]] = []
    step = StepTime(fixed_s=0.02, per_token_s=1e-3)
    options = ReplicaOptions(model=str(small_model), pool_chunks=8, max_sequence_tokens=512, simulated_step=step)
    engine = build_engine(options, events.extend)
    prompt = list(range(1000, 1100))
    engine.start()
    try:
        begin_s = time.monotonic()
        engine.submit(
            Request(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3, temperature=0))
        )
        while not events or events[-1][1].finish_reason is None:
            time.sleep(0.005)
            assert time.monotonic() < begin_s + 30
        took_s = time.monotonic() - begin_s
    finally:
        engine.stop()
    # A step for the prompt, and one for each of two more tokens.
    assert took_s >= 3 * 0.02 + 102 * 1e-3
    model = FakeModelRunner(vocab_size=49152, num_slots=1, chunk_size=64)
    tokens = [*prompt]
    for _ in range(3):
        tokens.append(model.next_token("", tokens))
    assert [token for _, event in events for token in event.token_ids] == tokens[100:]


def test_a_report_is_another_one_only_when_more_than_time_has_passed(make: Callable[..., Bench]) -> None:
    now_s = [100.0]
    scheme = ChunkScheme(model="toy", dtype="float32", chunk_size=C)
    reporter = RoutingReporter(scheme, max_step_tokens=64, wall_clock=lambda: now_s[0])
    bench = make(reporter=reporter)

    def told() -> RoutingReport:
        now_s[0] += 1
        reporter.publish(bench.engine._scheduler, bench.engine._prompts, now=True)
        report = reporter.report()
        assert report is not None
        return report

    first = told()
    assert told() is first
    bench.engine.submit(request("r", list(range(2 * C + 1))))
    bench.run()
    after = told()
    assert after.taken_at_s == now_s[0]
    assert after.sequence == len(reporter.journal) == 2
    assert told() is after


class NoRanks:
    """In place of the sync of several ranks: counts its exchanges, and wakes who waits for the third."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.third = threading.Event()

    def take_due(self) -> list[TreeEdit]:
        return []

    def exchange(self) -> None:
        self.exchanges += 1
        if self.exchanges == 3:
            self.third.set()

    def leave(self, reason: str | None) -> None:
        assert reason is None


def test_an_idle_group_looks_over_its_tree_after_work_and_not_with_each_beat(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkserve.replica.engine._IDLE_BEAT_S", 0.001)
    bench, sync, checks = Bench(tokenizer), NoRanks(), []
    monkeypatch.setattr(bench.engine, "_sync", sync)
    monkeypatch.setattr(bench.engine, "check", lambda: checks.append(sync.exchanges))
    bench.engine.start()
    assert sync.third.wait(10)
    bench.engine.stop()
    assert not checks


def test_an_engine_looks_over_its_tree_once_when_its_work_is_done(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, checked = Bench(tokenizer), threading.Event()
    checks: list[int] = []

    def check() -> None:
        checks.append(bench.engine.load().running_sequences)
        checked.set()

    monkeypatch.setattr(bench.engine, "check", check)
    bench.engine.start()
    bench.engine.submit(request("r", [1, 2], max_tokens=4))
    assert checked.wait(10)
    bench.engine.ping(timeout_s=10)
    bench.engine.stop()
    assert checks == [0]


def test_routers_hear_what_prompts_took(make: Callable[..., Bench]) -> None:
    reporter = RoutingReporter(ChunkScheme(model="toy", dtype="float32", chunk_size=C), max_step_tokens=64)
    bench = make(reporter=reporter)

    def told() -> tuple[int, int]:
        reporter.publish(bench.engine._scheduler, bench.engine._prompts, now=True)
        report = reporter.report()
        assert report is not None
        return report.computed_tokens, report.computed_steps

    cold, warm = list(range(70)), [*range(70), 5, 6]
    bench.engine.submit(request("cold", cold))
    bench.run()
    assert told() == (70, 2), "two steps of 64; what was generated does not count"
    bench.engine.submit(request("warm", warm))
    bench.engine.submit(request("other", [90] * 10))
    bench.run()
    assert told() == (70 + 2 + 10, 2 + 1 + 1), "a step for each prompt, although they share one"
