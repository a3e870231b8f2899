"""Plans where a mistake would let somebody in, take something away, or end half-way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.plan import PlanConflict, plan
from agent.enclosure_control.records import (
    Address,
    Bdev,
    Host,
    Key,
    Namespace,
    NvmeController,
    Present,
    Subsystem,
    Traits,
    Transport,
    canonical_address,
)
from agent.enclosure_control.steps import AddHost, AddKey, AddNamespace, RemoveKey, SetAllowAnyHost, SetKeys
from agent.errors import ConfigError

NQN = "nqn.2026-01.io.g35:shelf-1"
OTHER = "nqn.2026-01.io.g35:shelf-2"
HOST = "nqn.2026-01.io.g35:host-1"
UUID = "6c9f9309-da0b-53da-a812-5ffdb2e7b085"
MALLOC = Bdev("M", "malloc", 4096, 256, UUID, (UUID,))


def described(subsystem: dict[str, Any] | None = None, **sections: Any) -> Description:
    subsystems = [] if subsystem is None else [{"nqn": NQN} | subsystem]
    return parse_description({"subsystems": subsystems} | sections, "test")


def served(*namespaces: Namespace, **changes: Any) -> Subsystem:
    return Subsystem(NQN, max_namespaces=32, namespaces=namespaces, **changes)


# --- keys -------------------------------------------------------------------------------------------------

WITH_KEY = described({"hosts": [{"nqn": HOST, "key": "k"}]}, keys=[{"name": "k", "file": "/k2"}])
NAMED = served(hosts=(Host(HOST, "k"),))
EXCHANGE = (
    AddKey("k~", "/k2"),
    SetKeys(NQN, Host(HOST, "k~")),
    AddKey("k", "/k2"),
    SetKeys(NQN, Host(HOST, "k")),
    RemoveKey("k~"),
)


def test_a_key_that_is_gone_while_a_host_names_it_is_given_to_the_host_again() -> None:
    """The host has the secret of before, whatever file the name has now."""
    assert plan(WITH_KEY, Present(subsystems=(NAMED,))).steps == EXCHANGE
    replaced = plan(WITH_KEY, Present(keys=(Key("k", "/k1"),), subsystems=(NAMED,))).steps
    assert replaced == (*EXCHANGE[:2], RemoveKey("k"), *EXCHANGE[2:])
    assert plan(WITH_KEY, Present(keys=(Key("k", "/k2"),), subsystems=(NAMED,))).steps == ()


def test_hosts_of_subsystems_that_are_not_described_get_the_new_secret_too() -> None:
    only_key = described(keys=[{"name": "k", "file": "/k2"}])
    steps = plan(only_key, Present(keys=(Key("k", "/k1"),), subsystems=(NAMED,))).steps
    assert steps == (*EXCHANGE[:2], RemoveKey("k"), *EXCHANGE[2:])


@pytest.mark.parametrize("done", range(7))
def test_an_exchange_that_ends_anywhere_is_finished_by_the_next_run(done: int) -> None:
    """Judged by what a host was given: the files that its names had at that moment."""
    files = {"k": "/k1"}
    name, secret = "k", "/k1"

    def carry_out(most: int) -> None:
        nonlocal name, secret
        keys = tuple(Key(key, path) for key, path in files.items())
        there = Present(keys=keys, subsystems=(served(hosts=(Host(HOST, name),)),))
        for step in plan(WITH_KEY, there).steps[:most]:
            match step:
                case AddKey(key, path):
                    assert key not in files
                    files[key] = path
                case RemoveKey(key):
                    del files[key]
                case SetKeys(_, host):
                    assert host.key is not None
                    name, secret = host.key, files[host.key]
                case _:
                    pytest.fail(str(step))

    carry_out(done)
    carry_out(99)
    assert (name, secret, files) == ("k", "/k2", {"k": "/k2"})
    carry_out(0)


def test_a_key_of_an_nvme_controller_is_not_pruned() -> None:
    ssd = {"name": "N", "transport": "tcp", "address": "10.0.0.9", "key": "kk"}
    there = Present(keys=(Key("kk"),), nvme=(NvmeController("N", Address("TCP", "10.0.0.9", "4420")),))
    assert plan(described(nvme=[ssd]), there, prune=True).steps == ()


# --- what prune takes away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("called", ["M", UUID, UUID.upper()])
def test_a_bdev_in_use_is_not_pruned_by_whatever_name_it_is_used(called: str) -> None:
    there = Present(bdevs=(MALLOC,), subsystems=(served(Namespace(1, "M")),))
    wanted = described({"namespaces": [{"nsid": 1, "bdev": called}]})
    assert plan(wanted, there, prune=True).steps == ()


def test_nor_is_the_controller_that_it_belongs_to() -> None:
    disk = dataclasses.replace(MALLOC, name="Ssdn1", kind="nvme")
    there = Present(
        bdevs=(disk,),
        nvme=(NvmeController("Ssd"), NvmeController("Ss")),
        subsystems=(served(Namespace(1, "Ssdn1")),),
    )
    found = plan(described({"namespaces": [{"nsid": 1, "bdev": UUID}]}), there, prune=True)
    assert [str(step) for step in found.steps] == ["delete nvme bdev Ss"]


# --- doors ------------------------------------------------------------------------------------------------


def test_doors_are_shut_before_anything_new_is_offered() -> None:
    wanted = described(
        {"namespaces": [{"nsid": 1, "bdev": "M"}], "hosts": [{"nqn": HOST, "key": "k"}]},
        malloc=[{"name": "M", "size": "1M"}],
    )
    keys = (Key("k"),)
    opened = Present(keys=keys, subsystems=(served(allow_any_host=True),))
    kinds = [type(step) for step in plan(wanted, opened).steps]
    assert kinds[:2] == [SetAllowAnyHost, AddHost]
    assert kinds[-1] is AddNamespace
    keyless = Present(keys=keys, subsystems=(served(hosts=(Host(HOST), Host("nqn.stranger"))),))
    pruned = [str(step).removeprefix(f"{NQN}: ") for step in plan(wanted, keyless, prune=True).steps]
    assert pruned == [
        f"set the keys of host {HOST}",
        "remove host nqn.stranger",
        "create malloc bdev M of 1 MiB",
        "add namespace 1 on M",
    ]


NVMET = Traits(max_namespaces=None, transports_are_made=False, any_or_named=True, hosts_are_shared=True)


def test_named_hosts_do_not_end_unasked() -> None:
    there = Present(subsystems=(served(hosts=(Host(HOST),)),), traits=NVMET)
    anybody = described({"allow_any_host": True})
    with pytest.raises(PlanConflict, match="named hosts"):
        plan(anybody, there)
    kinds = [type(step).__name__ for step in plan(anybody, there, prune=True).steps]
    assert kinds == ["RemoveHost", "SetAllowAnyHost"]


def test_a_key_that_another_subsystem_keeps_alive_is_a_conflict() -> None:
    """nvmet forgets a host's key with the host, so each run would do the same in vain."""
    with_key = served(hosts=(Host(HOST, "k"),))
    there = Present(subsystems=(with_key, dataclasses.replace(with_key, nqn=OTHER)), traits=NVMET)
    keyless = described({"hosts": [{"nqn": HOST}]})
    with pytest.raises(PlanConflict, match="keeps its key"):
        plan(keyless, there)
    assert plan(keyless, there, prune=True).steps


# --- said before the first step ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subsystem", "sections", "part"),
    [
        ({"listeners": [{"address": "::1"}]}, {}, r"no transport TCP"),
        ({"namespaces": [{"nsid": 1, "bdev": "X"}]}, {}, "no bdev X"),
        ({"hosts": [{"nqn": HOST, "key": "x"}]}, {}, "no key x"),
        ({"namespaces": [{"nsid": 33, "bdev": "M"}]}, {}, "up to 32, not for 33"),
        ({}, {"lvol_stores": [{"name": "s", "bdev": "X"}]}, "no bdev X"),
        ({}, {"lvols": [{"name": "v", "store": "s", "size": "4M"}]}, "no store s"),
        (
            {"namespaces": [{"nsid": 1, "bdev": "M"}, {"nsid": 2, "bdev": UUID}]},
            {},
            "are the same bdev, M",
        ),
        ({}, {"nvme": [{"name": "N", "address": "0000:3b:00.0", "nqn": "nqn.far"}]}, "nqn.near, not nqn.far"),
    ],
)
@pytest.mark.parametrize("new", [False, True])
def test_what_would_be_refused_is_said_first(
    subsystem: dict[str, Any], sections: dict[str, Any], part: str, new: bool
) -> None:
    attached = NvmeController("N", Address("PCIE", "0000:3b:00.0"), "nqn.near")
    there = Present(bdevs=(MALLOC,), nvme=(attached,), subsystems=() if new else (served(),))
    with pytest.raises(PlanConflict, match=part):
        plan(described(subsystem, **sections), there)


def test_what_an_examination_may_bring_is_not_missing() -> None:
    wanted = described(
        {"namespaces": [{"nsid": 1, "bdev": "lvs/a"}], "listeners": [{"address": "::1"}]},
        aio=[{"name": "A", "file": "/a"}],
    )
    there = Present(transports=(Transport("TCP"),))
    assert type(plan(wanted, there).steps[-2]) is AddNamespace


def test_addresses_have_one_spelling() -> None:
    assert canonical_address("3B:00.0") == canonical_address("0000:3b:00.0") == "0000:3b:00.0"
    ssd = described(nvme=[{"name": "N", "address": "0000:3B:00.0"}])
    there = Present(nvme=(NvmeController("N", Address("PCIE", "0000:3b:00.0")),))
    assert plan(ssd, there).steps == ()


@pytest.mark.parametrize(
    ("subsystem", "sections", "part"),
    [
        ({"namespaces": [{"nsid": 1, "bdev": "M"}, {"nsid": 2, "bdev": "M"}]}, {}, "bdev of a namespace"),
        (
            {"namespaces": [{"nsid": n, "bdev": f"M{n}", "nguid": "11" * 16} for n in (1, 2)]},
            {},
            "same nguid",
        ),
        ({"namespaces": [{"nsid": n, "bdev": f"M{n}", "uuid": UUID} for n in (1, 2)]}, {}, "same uuid"),
        ({}, {"aio": [{"name": "A", "file": "/d"}, {"name": "B", "file": "/x/../d"}]}, "file of"),
        ({"namespaces": [{"nsid": 1, "bdev": "M", "uuid": "0" * 32}]}, {}, "zeros"),
    ],
)
def test_one_thing_by_two_names_is_refused(
    subsystem: dict[str, Any], sections: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        described(subsystem, **sections)


def test_a_conflict_cannot_write_to_the_terminal() -> None:
    there = Present(bdevs=(Bdev("A", "aio", 4096, 8, filename="/x\x1b[31m"),))
    with pytest.raises(PlanConflict) as caught:
        plan(described(aio=[{"name": "A", "file": "/y"}]), there)
    assert r"file /x\x1b[31m, not /y" in caught.value.message
