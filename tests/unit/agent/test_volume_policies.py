"""The configuration of serving: what is refused, and what the agent makes of the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent.config.configuration import Configuration, parse_configuration
from agent.errors import ConfigError
from agent.pool.access import serve
from agent.pool.kv.volume import KvVolume
from agent.pool.volume.settings import KvShare, Timing
from agent.service.queue_plan import EXTRA_QUEUES, QueuePlan
from agent.service.volume_policies import VolumePolicies
from host_shim.control_wire import Outcome
from tests.support.pool.memory_pool import MemoryPool, fixed_secret, key_of, nguid_of, volume_settings


def configuration(**sections: Any) -> Configuration:
    return parse_configuration(
        {
            "agent": {"mount": "/mnt/g35", "state": "/nonexistent", "key_file": "/nonexistent", "workers": 2},
            "enclosures": [{"name": "one", "address": "127.0.0.1", "nqn": "nqn.2014-08.org.nvmexpress:one"}],
            **sections,
        },
        "a test's",
    )


def serving_of(found: Configuration, volumes: list[Any]) -> VolumePolicies:
    return VolumePolicies(found, volumes, lambda _: pytest.fail("no channel is wanted"), QueuePlan.of(found))


def test_by_default_nothing_is_guessed_and_puts_go_through() -> None:
    volume = MemoryPool().agent().volume
    serving = serving_of(configuration(), [volume])
    assert not serving.readahead.active
    assert not serving.prestage.waits_open
    assert serving.prestage.budget_bytes == 256 << 20
    (served,) = serving.served
    assert (served.gate, served.admission, served.back) == (None, None, None)
    assert QueuePlan.of(configuration()).write_back is None


def test_a_policy_is_applied_to_its_volume() -> None:
    volume = MemoryPool().agent().volume
    policy = {"volume": "v", "write": "back", "write_back_memory": "2M"}
    found = configuration(
        policies=[policy | {"prefill_tokens_per_s": 5000, "bytes_per_token": "2K"}],
        prestage={"memory": "1M", "learn": True, "depth": 2, "waits": "open"},
    )
    serving = serving_of(found, [volume])
    assert serving.readahead.active
    assert serving.prestage.waits_open
    (served,) = serving.served
    assert served.gate is not None
    assert served.back is not None
    assert served.back.bytes_max == 2 << 20
    assert QueuePlan.of(found).write_back == 2 + EXTRA_QUEUES + 1
    second = MemoryPool().agent().volume
    (served,) = serving_of(configuration(policies=[{"volume": "v", "write": "second-use"}]), [second]).served
    assert served.admission is not None


def test_without_memory_nothing_is_learned() -> None:
    assert not serving_of(configuration(prestage={"memory": 0, "learn": True}), []).readahead.active


@pytest.mark.parametrize(
    "wrong",
    [
        {"policies": [{"volume": "v", "prefill_tokens_per_s": 5}]},
        {"policies": [{"volume": "v", "bytes_per_token": 5}]},
        {"policies": [{"volume": "v", "write": "around"}]},
        {"policies": [{"volume": "v"}, {"volume": "v"}]},
        {
            "policies": [{"volume": "s", "write": "second-use"}],
            "volumes": [{"name": "s", "kind": "shared", "share": 0.5}],
        },
        {"prestage": {"depth": 0}},
        {"prestage": {"waits": "ajar"}},
        {"agent": {"prestage": "1M"}},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        configuration(**wrong)


def test_a_shared_volume_of_the_pool_takes_no_second_use() -> None:
    pool = MemoryPool()
    pool.settings = dataclasses.replace(pool.settings, kind="shared")
    volume = pool.agent().volume
    with pytest.raises(ConfigError, match="shared volume"):
        serving_of(configuration(policies=[{"volume": "v", "write": "second-use"}]), [volume])
    (served,) = serving_of(configuration(policies=[{"volume": "v", "write": "through"}]), [volume]).served
    assert served.admission is None


@pytest.mark.expects_log("policies names volume w")
def test_a_policy_for_a_volume_that_there_is_not_is_said_and_left() -> None:
    serving_of(configuration(policies=[{"volume": "w"}]), [MemoryPool().agent().volume])


def test_there_are_no_policies_for_kv_namespaces_and_no_prestaging() -> None:
    settings = volume_settings(sets=())
    shares = (KvShare(0, nguid_of(0), 1 << 30),)
    volume = KvVolume(dataclasses.replace(settings, shares=shares), fixed_secret(), Timing())
    with pytest.raises(ConfigError, match="KV namespaces"):
        serving_of(configuration(policies=[{"volume": "v"}]), [volume])
    serving = serving_of(configuration(), [volume])
    assert serving.start_prestage(serve(volume), key_of(1)) is Outcome.REFUSED


def test_an_announcement_is_answered_by_what_became_of_it() -> None:
    agent = MemoryPool().agent()
    agent.put(key_of(1), b"a value")
    serving = serving_of(configuration(), [agent.volume])
    assert serving.start_prestage(agent.served, key_of(1), 5) is Outcome.STARTED
    volume_id, pseudonym = agent.volume.settings.volume_id, agent.volume.placement.pseudonym(key_of(1))
    assert serving.prestage.bring(volume_id, pseudonym, 1, memoryview(bytes(4096)))
    assert serving.start_prestage(agent.served, key_of(1)) is Outcome.HIT
    assert (
        serving_of(configuration(prestage={"memory": 0}), []).start_prestage(agent.served, key_of(1))
        is Outcome.REFUSED
    )
