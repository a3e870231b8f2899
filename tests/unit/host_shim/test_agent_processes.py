"""host_shim before an agent of several processes: gets go to all in turn, all else to the first."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import pytest

from host_shim import agent_processes
from host_shim.block_key import key_of
from host_shim.control_wire import Operation, Outcome
from host_shim.pool import Pool
from host_shim.session_files import Files
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.engines.several_processes import SeveralProcesses

KEYS = [key_of(f"block {number}") for number in range(12)]
VALUE = b"value" * 1000


@pytest.fixture
def agent() -> SeveralProcesses:
    return SeveralProcesses(2)


@pytest.fixture
def pool(agent: SeveralProcesses) -> Pool:
    made = Pool("/mnt", files=agent)
    assert made.volume("kv").put_many(KEYS, [VALUE] * len(KEYS)) == [True] * len(KEYS)
    return made


def get_all(pool: Pool) -> None:
    buffer = bytearray(len(VALUE) + 1)
    for key in KEYS:
        assert pool.volume("kv").get_into(key, buffer) == len(VALUE)
        assert buffer[: len(VALUE)] == VALUE


def test_gets_go_to_all_in_turn_and_all_else_to_the_first(pool: Pool, agent: SeveralProcesses) -> None:
    volume = pool.volume("kv")
    get_all(pool)
    assert agent.gets() == [4, 4, 4]
    for _ in range(3):
        fetched = volume.fetch([*KEYS, key_of("none")], [bytearray(len(VALUE) + 1) for _ in range(13)])
        assert [each.length for each in fetched] == [len(VALUE)] * 12 + [None]
        assert fetched[-1].outcome is Outcome.NEVER_STORED
        assert volume.exists(KEYS) == [True] * 12
    assert agent.gets() == [17, 17, 17]
    assert volume.pin(KEYS[:1]) == volume.delete(KEYS[:1]) == [True]
    assert volume.put(KEYS[0], VALUE)
    for operation in (Operation.PUT, Operation.PIN, Operation.DELETE):
        assert agent.asked(operation)[1:] == [0, 0]
    assert pool.close()
    assert [each.open_files for each in agent.all] == [0, 0, 0]


def test_a_long_batch_is_divided_among_all(
    pool: Pool, agent: SeveralProcesses, expects_log: Callable[..., None]
) -> None:
    get_all(pool)
    before = agent.gets()
    keys = [KEYS[at % 12] if at % 5 else key_of(f"none {at}") for at in range(200)]
    buffers = [bytearray(len(VALUE) + 1) for _ in keys]
    lengths = pool.volume("kv").get_many(keys, buffers)
    assert lengths == [len(VALUE) if at % 5 else None for at in range(200)]
    assert all(buffer[:-1] == VALUE for at, buffer in enumerate(buffers) if at % 5)
    shares = [now - was for now, was in zip(agent.gets(), before, strict=True)]
    assert sorted(shares) == [66, 67, 67]
    expects_log("longer than the buffer")
    assert pool.volume("kv").get_many(keys, [bytearray(16) for _ in keys]) == [None] * 200


def test_an_agent_of_one_process_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = SeveralProcesses(0)
    with Pool("/mnt", files=agent) as pool:
        assert pool.volume("kv").put_many(KEYS, [VALUE] * len(KEYS))
        get_all(pool)
        assert (agent.gets(), agent.looks) == ([12], 1)
        monkeypatch.setattr(agent_processes, "LOOK_SECONDS", 0.0)
        pool._processes._look_at = 0.0
        get_all(pool)
    assert agent.looks > 1


@pytest.mark.parametrize("code", [errno.EREMOTE, errno.EOPNOTSUPP, errno.ENOENT, errno.EAGAIN, errno.EIO])
def test_what_a_process_refuses_the_first_is_asked_for(
    pool: Pool, agent: SeveralProcesses, code: int
) -> None:
    volume = pool.volume("kv")
    get_all(pool)
    for way in (
        lambda: volume.get_into(KEYS[0], bytearray(len(VALUE) + 1)) == len(VALUE),
        lambda: volume.get_many(KEYS[:1], [bytearray(len(VALUE) + 1)]) == [len(VALUE)],
        lambda: volume.exists(KEYS[:1]) == [True],
    ):
        refusing(way, agent, lambda each: each.fail(code))
        for each in agent.all:
            each._fail_next.clear()
        pool._processes._aside.clear()


def refusing(
    way: Callable[[], bool], agent: SeveralProcesses, refuse: Callable[[ScriptedAgent], None]
) -> None:
    for _ in range(3):
        for each in agent.all[1:]:
            refuse(each)
        assert way()


def test_one_that_has_refused_is_left_alone_for_a_moment(
    pool: Pool, agent: SeveralProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_all(pool)
    agent.all[1].serve(("another",))
    before = agent.gets()
    for _ in range(5):
        get_all(pool)
    assert agent.gets()[1] == before[1] + 1
    agent.all[1].serve(("kv",))
    pool._processes._aside = dict.fromkeys(pool._processes._aside, 0.0)  # the moment is over
    get_all(pool)
    assert agent.gets()[1] == before[1] + 5


def test_one_that_dies_costs_no_get(pool: Pool, agent: SeveralProcesses) -> None:
    get_all(pool)
    agent.all[1].kill()
    agent.all[2].kill()
    for _ in range(3):
        get_all(pool)
        volume = pool.volume("kv")
        assert volume.get_many(KEYS, [bytearray(len(VALUE) + 1) for _ in KEYS]) == [len(VALUE)] * 12
        assert volume.exists(KEYS) == [True] * 12
        pool._processes._aside.clear()


def test_keys_that_were_prestaged_are_got_from_the_first(pool: Pool, agent: SeveralProcesses) -> None:
    get_all(pool)
    before = agent.gets()
    assert pool.volume("kv").prestage(KEYS) == [True] * len(KEYS)
    get_all(pool)
    assert agent.gets() == [before[0] + 12, *before[1:]]
    get_all(pool)
    assert agent.gets()[1] > before[1]


def test_prestaged_keys_are_remembered_up_to_a_bound(
    pool: Pool, agent: SeveralProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_processes, "PRESTAGED_MAX", 20)
    get_all(pool)
    for number in range(10):
        pool.volume("kv").prestage([key_of(f"{number} {at}") for at in range(12)])
        assert len(pool._processes._prestaged) <= 20


def test_a_closed_pool_asks_no_process(pool: Pool, agent: SeveralProcesses) -> None:
    get_all(pool)
    assert pool.close()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            pool.volume("kv").get_into(KEYS[0], bytearray(8))
    assert [each.open_files for each in agent.all] == [0, 0, 0]


def test_a_buffer_that_is_too_small_is_told_by_any_process(pool: Pool) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="longer than the buffer"):
            pool.volume("kv").get_into(KEYS[0], bytearray(16))


def test_folders_of_processes_are_found_by_their_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("control")
    for name in ("process-1", "process-2", "session"):
        (folder / name).mkdir()
    names: Sequence[str] = Files().processes(str(folder))
    assert names == ["process-1", "process-2"]
    assert Files().processes(str(folder / "none")) == []
