"""A replay against a scripted agent: what is played, what is counted, and that it adds up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import UserError
from agent.host_os.hung_agent import AgentHangs
from agent.replay.content import BlockContent
from agent.replay.course import SAMPLES_MAX, Course, Sample, draw
from agent.replay.latencies import Latencies, merged
from agent.replay.lru import LruBaseline
from agent.replay.player import Player, Schedule
from agent.replay.replay_options import ReplayOptions
from agent.replay.report import Report, readable_bytes
from agent.replay.run_replay import run_replay
from agent.replay.tally import Cause, Tally, cause_of, total
from agent.replay.trace_generator import encode_line, made_trace
from agent.replay.trace_lines import TraceRequest
from host_shim.control_wire import Operation, Outcome
from host_shim.pool import CLOSE_SECONDS, Pool
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

CONTENT = BlockContent(4096)


def _player(agent: ScriptedAgent) -> tuple[Player, Pool]:
    pool = Pool("/nowhere", files=agent)
    return Player(pool.volume("kv"), CONTENT, Schedule(iter(()))), pool


def _request(*hash_ids: int, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(0.0, 512 * len(hash_ids) if tokens is None else tokens, 10, hash_ids)


def _checked(tally: Tally) -> Tally:
    assert tally.hits + tally.misses.total() == tally.blocks
    assert tally.puts - tally.puts_refused == tally.bytes_written // 4096
    return tally


def test_the_first_time_all_is_stored_the_second_time_all_is_read() -> None:
    agent = ScriptedAgent()
    player, pool = _player(agent)
    with pool:
        player.play(_request(1, 2, 3))
        assert player.tally.misses[Cause.NEVER_STORED] == 3
        assert len(agent.values) == 3
        player.play(_request(1, 2, 3, tokens=1100))
    tally = _checked(player.tally)
    assert (tally.hits, tally.bytes_read, tally.bytes_written) == (3, 3 * 4096, 3 * 4096)
    assert (tally.tokens, tally.tokens_saved) == (1536 + 1100, 1100)
    assert tally.wrong_bytes == 0
    assert tally.get_latencies.total == 3


def test_a_request_asks_once_for_its_prefix_and_prestages_what_follows_its_first_block() -> None:
    agent = ScriptedAgent()
    player, pool = _player(agent)
    with pool:
        player.play(_request(1, 2, 3))
        agent.requests.clear()
        player.play(_request(1, 2, 3))
    # A full buffer may hold a part of a value: whether it is whole is asked where longer ones fit the volume.
    asides = (Operation.STATS, Operation.OUTCOME)
    operations = [request.operation for request in agent.requests if request.operation not in asides]
    assert operations == [Operation.EXISTS, Operation.PRESTAGE] + [Operation.GET] * 3
    assert agent.prestaged == [CONTENT.key(2), CONTENT.key(3)]


def test_behind_a_hole_nothing_is_read_and_only_the_hole_is_written() -> None:
    agent = ScriptedAgent()
    player, pool = _player(agent)
    with pool:
        player.play(_request(1, 2, 3, 4))
        del agent.values["kv", CONTENT.key(2)]
        agent.causes[CONTENT.key(2)] = Outcome.EVICTED
        player.play(_request(1, 2, 3, 4))
        assert ("kv", CONTENT.key(2)) in agent.values
    tally = _checked(player.tally)
    assert tally.hits == 1
    assert tally.misses == {Cause.NEVER_STORED: 4, Cause.EVICTED: 1, Cause.BEHIND_A_HOLE: 2}
    assert tally.puts == 5


def test_a_block_that_was_promised_and_does_not_come_is_one_miss_and_stored_again() -> None:
    agent = ScriptedAgent()
    player, pool = _player(agent)
    with pool:
        player.play(_request(1, 2, 3))
        honest = agent._body

        def promising(file: object, request: object) -> bytes:
            body = honest(file, request)  # type: ignore[arg-type]
            if request.operation is Operation.EXISTS:  # type: ignore[attr-defined]
                agent.values.pop(("kv", CONTENT.key(2)), None)
                agent.causes[CONTENT.key(2)] = Outcome.LATE
            return body

        agent._body = promising  # type: ignore[method-assign, assignment]
        player.play(_request(1, 2, 3))
    tally = _checked(player.tally)
    assert tally.hits == 1
    assert tally.misses[Cause.LATE] == 1
    assert tally.misses[Cause.BEHIND_A_HOLE] == 1
    assert tally.puts == 4


@pytest.mark.parametrize("damage", ["bit", "short", "other block"])
def test_a_wrong_byte_is_counted_and_the_prefix_ends_there(damage: str) -> None:
    agent = ScriptedAgent()
    player, pool = _player(agent)
    with pool:
        player.play(_request(1, 2, 3))
        place = ("kv", CONTENT.key(2))
        right = agent.values[place]
        agent.values[place] = {
            "bit": right[:2000] + bytes([right[2000] ^ 1]) + right[2001:],
            "short": right[:4000],
            "other block": agent.values["kv", CONTENT.key(3)],
        }[damage]
        player.play(_request(1, 2, 3))
    tally = _checked(player.tally)
    assert tally.wrong_blocks == 1
    assert tally.wrong_bytes == 1 if damage == "bit" else tally.wrong_bytes > 0
    assert tally.misses[Cause.WRONG_BYTES] == 1
    assert tally.hits == 1


def test_without_an_agent_everything_is_a_miss_and_nothing_raises() -> None:
    agent = ScriptedAgent()
    player, pool = _player(agent)
    with pool:
        agent.kill()
        player.play(_request(1, 2, 3))
        player.play(_request())
    tally = _checked(player.tally)
    assert tally.misses == {Cause.AGENT_DOWN: 3}
    assert tally.puts_refused == 3
    assert tally.requests == 2


@pytest.mark.parametrize("outcome", [None, *Outcome])
def test_every_outcome_has_a_cause(outcome: Outcome | None) -> None:
    assert cause_of(outcome) in Cause


def _options(tmp_path: Path, lines: list[str], **wishes: object) -> ReplayOptions:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    standard = {"mount": tmp_path, "bytes_per_token": 8, "json_output": True}
    return ReplayOptions(trace=trace, **{**standard, **wishes})  # type: ignore[arg-type]


def _opener(agent: ScriptedAgent) -> Callable[[ReplayOptions], Pool]:
    return lambda options: Pool(options.mount, sessions=options.concurrency + 1, files=agent)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_whole_replay_adds_up(tmp_path: Path, concurrency: int) -> None:
    lines = [encode_line(request) for request in made_trace(1, 200)]
    options = _options(tmp_path, [*lines, "broken"], concurrency=concurrency, lru_bytes="1G")
    report = run_replay(options, _opener(ScriptedAgent()))
    assert report.good
    record = report.record()
    assert record["requests"] == 200
    assert record["broken_lines"] == 1
    assert record["wrong_bytes"] == 0
    assert sum(record["miss_causes"].values()) == record["misses"] == record["blocks"] - record["hits"]
    if concurrency == 1:
        # An LRU that never forgets and an agent that never forgets have the same hits.
        assert record["hit_ratio"] == record["lru_hit_ratio"] > 0.5
    json.dumps(record)
    assert dict(report.rows())["wrong bytes"] == "0"


def test_the_agents_capacity_is_the_baselines(tmp_path: Path) -> None:
    agent = ScriptedAgent()
    body = json.dumps({"volumes": [{"name": "kv", "slots": 10, "value_bytes": 4096}]}).encode()
    plain = agent._body
    agent._body = lambda file, request: (  # type: ignore[method-assign]
        body if request.operation is Operation.STATS else plain(file, request)
    )
    lines = [encode_line(request) for request in made_trace(1, 20)]
    assert run_replay(_options(tmp_path, lines), _opener(agent)).lru_blocks == 10


def test_wrong_bytes_make_a_replay_fail(tmp_path: Path) -> None:
    agent = ScriptedAgent()
    lines = [encode_line(request) for request in made_trace(1, 20)]
    run_replay(_options(tmp_path, lines), _opener(agent))
    for place, value in agent.values.items():
        agent.values[place] = value[:-1] + bytes([value[-1] ^ 0x80])
    report = run_replay(_options(tmp_path, lines), _opener(agent))
    assert not report.good
    assert "wrong bytes were served" in report.troubles()[0]


def _dying_after(agent: ScriptedAgent, requests: int, restart_s: float | None = None) -> None:
    """Let the agent die at its `requests`-th request, and come back after `restart_s` seconds."""
    plain = agent._body
    died: list[threading.Timer] = []

    def dying(file: object, request: object) -> bytes:
        if len(agent.requests) > requests and not died:
            agent.kill()
            died.append(threading.Timer(restart_s or 0.0, agent.restart))
            if restart_s is not None:
                died[0].start()
        return plain(file, request)  # type: ignore[arg-type]

    agent._body = dying  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("concurrency", [1, 6])
def test_an_agent_that_does_not_come_back_ends_a_replay(
    tmp_path: Path, concurrency: int, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = ScriptedAgent()
    _dying_after(agent, 50)
    lines = [encode_line(request) for request in made_trace(1, 100)]
    options = _options(tmp_path, lines, agent_wait=0.2, concurrency=concurrency)
    report = run_replay(options, _opener(agent))
    _checked(report.sums)
    assert 0 < report.sums.requests < 100
    assert len(report.troubles()) == 1
    assert "did not come back within 0.2 s" in report.troubles()[0]
    assert report.record()["agent_waits"] == 1
    assert report.sums.misses[Cause.AGENT_DOWN] > 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "no agent answers; waiting up to 0.2 s for it",
        "the agent has not come back within 0.2 s; the replay ends",
    ]


@pytest.mark.parametrize("concurrency", [1, 6])
def test_an_agent_that_comes_back_costs_time_and_no_request(
    tmp_path: Path, concurrency: int, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = ScriptedAgent()
    _dying_after(agent, 50, restart_s=0.3)
    lines = [encode_line(request) for request in made_trace(1, 100)]
    report = run_replay(_options(tmp_path, lines, agent_wait=30.0, concurrency=concurrency), _opener(agent))
    sums = _checked(report.sums)
    assert report.good
    assert sums.requests == 100
    assert sums.misses[Cause.AGENT_DOWN] == 0, "every call was made again"
    assert sums.puts_refused == 0
    assert report.agent_waits == 1
    assert report.agent_wait_seconds >= 0.2
    assert "waited for the agent" in dict(report.rows())
    assert "the agent answers again" in capsys.readouterr().err


def test_an_agent_that_dies_at_the_very_end_makes_a_replay_fail(tmp_path: Path) -> None:
    agent = ScriptedAgent()
    lines = [encode_line(_request(1))]
    plain = agent._write_value

    def last(*words: object) -> None:
        plain(*words)  # type: ignore[arg-type]
        agent.kill()

    agent._write_value = last  # type: ignore[method-assign, assignment]
    report = run_replay(_options(tmp_path, lines, agent_wait=0.1), _opener(agent))
    assert report.sums.requests == 1
    assert report.troubles() == ["no agent answers behind the mount any more"]


@pytest.mark.parametrize("when", ["at the start", "amid a call"])
def test_an_agent_that_hangs_ends_a_replay_and_is_named(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start within the time that every verb waits; and at its end it waits for no hung call."""
    monkeypatch.setattr("agent.replay.run_replay.LOOK_SECONDS", 0.2)
    agent = ScriptedAgent()
    goes_on = threading.Event()
    hung = agent.pwrite

    def hanging(descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if when == "at the start" or len(agent.values) == 20:
            goes_on.wait(60)
        return hung(descriptor, data, offset)

    agent.pwrite = hanging  # type: ignore[method-assign]
    lines = [encode_line(request) for request in made_trace(1, 100)]
    hung_seconds = 0.2 if when == "amid a call" else 60.0
    monkeypatch.setattr("agent.replay.run_replay.HUNG_SECONDS", hung_seconds)
    began = time.monotonic()
    try:
        with pytest.raises(AgentHangs, match=r"not answered for 0\.2 s: it is stopped or it hangs"):
            run_replay(_options(tmp_path, lines), _opener(agent))
        assert time.monotonic() - began < CLOSE_SECONDS
    finally:
        goes_on.set()
        wait_until(lambda: not any(one.name.startswith(("player", "asks")) for one in threading.enumerate()))


def test_no_mount_no_replay(tmp_path: Path) -> None:
    agent = ScriptedAgent()
    agent.kill()
    with pytest.raises(UserError, match="no g35 agent answers") as refused:
        run_replay(_options(tmp_path, ["{}"]), _opener(agent))
    assert "g35 up" in refused.value.advice


def test_a_dead_mount_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ScriptedAgent()
    agent.kill()
    monkeypatch.setattr("agent.replay.run_replay.is_mounted", lambda _mount: True)
    with pytest.raises(UserError, match="no g35 agent answers") as refused:
        run_replay(_options(tmp_path, ["{}"]), _opener(agent))
    assert "its agent has ended: the next start" in refused.value.advice


def test_a_session_of_another_user_is_no_dead_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ScriptedAgent()
    agent.kill()
    monkeypatch.setattr("agent.replay.run_replay.is_mounted", lambda _mount: True)
    monkeypatch.setattr("agent.replay.run_replay.os.access", lambda *_: False)
    options = _options(tmp_path, ["{}"])
    (options.mount / ".g35").mkdir(parents=True)
    (options.mount / ".g35/session").touch()
    with pytest.raises(UserError, match="you may not open it"):
        run_replay(options, _opener(agent))


def test_an_unknown_volume_is_explained(tmp_path: Path) -> None:
    line = encode_line(_request(1))
    with pytest.raises(UserError, match="no volume 'none'"):
        run_replay(_options(tmp_path, [line], volume="none"), _opener(ScriptedAgent()))


def test_strict_ends_a_replay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 2"):
        run_replay(
            _options(tmp_path, [encode_line(_request(1)), "broken"], strict=True), _opener(ScriptedAgent())
        )


def test_an_empty_trace_is_no_success(tmp_path: Path) -> None:
    report = run_replay(_options(tmp_path, [""]), _opener(ScriptedAgent()))
    assert report.troubles() == ["the trace has no request that can be played"]


def test_time_scale_keeps_the_pace() -> None:
    requests = [TraceRequest(5000.0 + at, 1, 1, ()) for at in (0.0, 400.0, 800.0)]
    schedule = Schedule(iter(requests), time_scale=10.0)
    began = time.monotonic()
    while schedule.next_request() is not None:
        continue
    assert 0.08 <= time.monotonic() - began < 2.0


def test_waiting_for_the_time_of_a_request_ends_when_all_shall_stop() -> None:
    schedule = Schedule(iter([_request(), TraceRequest(3.6e6, 1, 1, ())]), time_scale=1.0)
    assert schedule.next_request() is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(schedule.next_request()))
    waiter.start()
    schedule.stopping.set()
    waiter.join(10)
    assert got == [None]


def test_lru_by_hand() -> None:
    baseline = LruBaseline(3)
    baseline.play([1, 2, 3])
    baseline.play([1, 4])  # 1 is a hit and young again; 4 takes the place of 2
    baseline.play([2, 1])  # 2 is a hole: 1 behind it counts for nothing; 3 goes
    baseline.play([1, 4, 2])
    assert (baseline.hits, baseline.blocks) == (1 + 3, 10)


def test_a_full_lru_on_the_real_trace(real_trace: Path) -> None:
    # Simulated apart from this code: the first 3,000 requests, room for a quarter of the blocks: 24.1 %.
    from itertools import islice

    from agent.replay.trace_lines import TraceFile

    requests = list(islice(iter(TraceFile(real_trace)), 3000))
    unique = {hash_id for request in requests for hash_id in request.hash_ids}
    baseline = LruBaseline(len(unique) // 4)
    for request in requests:
        baseline.play(request.hash_ids)
    assert round(baseline.hit_ratio, 3) == 0.241


@given(st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantiles_are_right_to_three_percent(times: list[float], share: float) -> None:
    latencies = Latencies()
    for one in times:
        latencies.add(one)
    exact = sorted(times)[max(1, -int(-share * len(times) // 1)) - 1]
    found = latencies.quantile(share)
    assert found is not None
    assert abs(found - exact) <= 0.03 * exact + 1e-7


def test_latencies_of_nothing_and_sums() -> None:
    one, other = Latencies(), Latencies()
    assert one.quantile(0.5) is None
    one.add(0.0)
    other.add(1e9)
    both = merged([one, other])
    assert both.total == 2
    assert both.since(one).counts == other.counts


def test_sums_of_tallies_are_copies() -> None:
    tally = Tally(blocks=3, hits=2)
    tally.misses[Cause.LATE] += 1
    sums = total([tally, tally])
    tally.blocks += 1
    assert (sums.blocks, sums.hits, sums.misses[Cause.LATE]) == (6, 4, 2)


def test_a_long_course_is_thinned(tmp_path: Path) -> None:
    course = Course(interval=0.0)
    sums = Tally()
    for at in range(10 * SAMPLES_MAX):
        sums.blocks, sums.hits, sums.bytes_read = at + 1, at // 2, at << 20
        sums.get_latencies.add(0.001)
        course.watch(float(at), total([sums]))
    assert len(course.samples) < SAMPLES_MAX
    assert [one.seconds for one in course.samples] == sorted(one.seconds for one in course.samples)


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_plot_is_drawn_of_whatever_there_is(tmp_path: Path, ending: str, count: int) -> None:
    samples = [Sample(at * 0.5, 10 * at, 4 * at, at << 30, at << 28, 0.001, 0.002) for at in range(count)]
    file = tmp_path / f"plot.{ending}"
    draw(samples, file, "a title")
    assert file.stat().st_size > 5000


def test_the_made_trace_is_the_bundled_one(repository: Path) -> None:
    bundled = (repository / "agent/replay/sample_trace.jsonl").read_text().splitlines()
    assert bundled == [encode_line(request) for request in made_trace(35, 600)]
    assert sum(map(len, bundled)) < 200_000


def test_a_made_trace_grows_conversations_over_shared_prompts() -> None:
    requests = list(made_trace(7, 400))
    assert [one.timestamp_ms for one in requests] == sorted(one.timestamp_ms for one in requests)
    assert all(len(one.hash_ids) == -(-one.input_length // 512) for one in requests)
    baseline = LruBaseline(1 << 20)
    for request in requests:
        baseline.play(request.hash_ids)
    assert baseline.hit_ratio > 0.6
    assert list(made_trace(7, 400)) == requests
    assert list(made_trace(8, 400)) != requests


def test_a_report_of_an_interrupted_replay_says_so() -> None:
    report = Report(Tally(requests=3), 1.0, 4096, 4096, planned_requests=5, finished=False, mount_alive=True)
    assert report.troubles() == ["3 of 5 requests were played"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1.049e+06 TiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert readable_bytes(count) == text
