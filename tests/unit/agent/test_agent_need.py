"""What an agent needs follows from its configuration alone."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from agent.cli.agent_verb import agent_need
from agent.config.configuration import Configuration, parse_configuration
from agent.service.why_alone import why_alone
from nvmeof.linux_limits import RESERVE_BYTES, Need, has_room_for

MIB = 1 << 20
ENCLOSURE = {"name": "one", "address": "127.0.0.1", "nqn": "nqn.2014-08.org.nvmexpress:one"}


def configuration_of(workers: int = 2, processes: int = 1, **sections: Any) -> Configuration:
    agent = {
        "mount": "/mnt/g35", "state": "/nonexistent", "key_file": "/nonexistent", "workers": workers,
        "processes": processes,
    }  # fmt: skip
    return parse_configuration({"agent": agent, "enclosures": [ENCLOSURE], **sections}, "a test's")


def need(workers: int = 2, processes: int = 1, **sections: Any) -> Need:
    return agent_need(configuration_of(workers, processes, **sections))


def test_the_figure_grows_with_what_is_promised() -> None:
    least = need()
    more = need(
        prestage={"memory": "512M"}, policies=[{"volume": "v", "write": "back", "write_back_memory": "64M"}]
    )
    assert more.memory_bytes - least.memory_bytes == (256 + 64 + 12) * MIB, "with a queue for writing back"
    assert more.threads == least.threads + 1


def test_workers_take_buffers_threads_and_a_queue_by_each_path() -> None:
    least, most = need(2), need(10, enclosures=[{**ENCLOSURE, "paths": ["127.0.0.2:4420"]}])
    assert most.memory_bytes - least.memory_bytes == 8 * 12 * MIB
    assert most.threads == least.threads + 8
    queues = least.threads - 16
    assert most.files - least.files == 2 * (queues + 8) * 3 - 2 * queues * 2


def test_each_process_is_a_program_with_workers_and_one_queue_more() -> None:
    """And with queues of the first process that lends it slots: one for each worker."""
    least, most = need(2), need(2, processes=4)
    lent = 0 if why_alone(configuration_of(processes=4)) else 3 * 2
    assert most.memory_bytes - least.memory_bytes == (3 * (384 + 3 * 12) + lent * 12) * MIB
    assert most.threads - least.threads == 3 * (3 + 16) + lent
    assert most.files - least.files == 2 * lent * 2, "a reader's own are counted for each process by itself"


def test_others_map_memory_only_where_the_reserve_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/proc/self/statm") as counts:
        in_use = int(counts.read().split()[0]) * resource.getpagesize()
    limit = in_use + RESERVE_BYTES + 400 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert has_room_for(300 * MIB)
    assert not has_room_for(500 * MIB)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert has_room_for(1 << 50)


def test_queues_of_guests_at_other_processes_take_buffers_and_threads() -> None:
    guests = [{"socket": f"/run/g35-{number}.sock", "queues": 4} for number in range(2)]
    alone, divided = need(2, virtiofs=guests), need(2, virtiofs=guests, processes=2)
    plain, plain_divided = need(2), need(2, processes=2)
    at_reader = 2 * 4 // 2
    assert (divided.threads - alone.threads) - (plain_divided.threads - plain.threads) == at_reader
    more = (divided.memory_bytes - alone.memory_bytes) - (plain_divided.memory_bytes - plain.memory_bytes)
    assert more == at_reader * 12 * MIB
