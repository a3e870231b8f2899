"""Plans: from a description and a present state to the fewest steps between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.plan import Plan, PlanConflict, plan
from agent.enclosure_control.records import (
    Address,
    Bdev,
    Host,
    Key,
    LvolStore,
    Namespace,
    NvmeController,
    Present,
    Subsystem,
)
from agent.enclosure_control.steps import (
    AddHost,
    AddKey,
    AddNamespace,
    AttachNvme,
    CreateAio,
    CreateLvol,
    CreateLvolStore,
    CreateMemory,
    CreateSubsystem,
    CreateTransport,
    DeleteBdev,
    DeleteSubsystem,
    RemoveHost,
    RemoveKey,
    RemoveListener,
    RemoveNamespace,
    ResizeLvol,
    SetAllowAnyHost,
    SetKeys,
    WaitForExamine,
)
from agent.errors import ConfigError
from tests.support.nvme.described_shelf import (
    AS_DESCRIBED,
    EXCHANGED,
    HOST,
    LISTENER,
    MALLOC,
    NGUID,
    NQN,
    REPLACED,
    SHELF,
    TEXT,
    UUID,
    described,
    steps_of,
    with_shelf,
)


def test_what_is_as_described_takes_no_step() -> None:
    assert plan(described(), AS_DESCRIBED) == Plan(())
    assert plan(described(), AS_DESCRIBED, prune=True) == Plan(())


def test_a_bare_target_gets_everything_and_its_listeners_last() -> None:
    kinds = [type(step).__name__ for step in steps_of(TEXT, Present())]
    assert kinds == [
        "CreateTransport", "AddKey", "CreateMemory", "CreateAio", "CreateSubsystem", "AddNamespace",
        "AddNamespace", "AddHost", "AddListener",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('nguid = "', f'uuid = "{UUID}"\nnguid = "', REPLACED),
        ('nsid = 2\nbdev = "Aio0"', 'nsid = 2\nbdev = "Spare"', REPLACED),
        ('"10.0.0.7"', '"10.0.0.8"', ["AddListener"]),
        (f'nqn = "{HOST}"', f'nqn = "{HOST}0"', ["AddHost"]),
        ('key = "host-1"', "", ["RemoveHost", "AddHost"]),
        ('key = "host-1"', 'key = "host-1"\ncontroller_key = "host-1"', ["SetKeys"]),
        ('file = "/etc/keys/host-1"', 'file = "/etc/keys/host-2"', EXCHANGED),
        ("[[aio]]", '[[aio]]\nname = "Aio1"\nfile = "/srv/more"\n[[aio]]', ["CreateAio"]),
    ],
)
def test_a_change_of_one_thing_takes_the_fewest_steps(old: str, new: str, expected: list[str]) -> None:
    assert TEXT.count(old) >= 1
    spare = dataclasses.replace(MALLOC, name="Spare", kind="other", uuid="")
    there = dataclasses.replace(AS_DESCRIBED, bdevs=(*AS_DESCRIBED.bdevs, spare))
    steps = steps_of(TEXT.replace(old, new, 1), there)
    assert [type(step).__name__ for step in steps] == expected


def test_hosts_are_named_before_the_door_is_shut_and_the_other_way_round() -> None:
    opened = with_shelf(allow_any_host=True, hosts=())
    assert steps_of(TEXT, opened) == (SetAllowAnyHost(NQN, False), AddHost(NQN, Host(HOST, "host-1")))
    start, _, _ = TEXT.partition("[[subsystems.hosts]]")
    wide = start.replace('serial = "S1"', 'serial = "S1"\nallow_any_host = true')
    found = plan(described(wide), AS_DESCRIBED)
    assert found.steps == (SetAllowAnyHost(NQN, True),)
    assert found.left_alone == (f"host {HOST} of {NQN}",)


def test_what_is_not_described_is_left_alone_unless_pruned() -> None:
    other = Subsystem("nqn.2026-01.io.g35:other", namespaces=(Namespace(1, "Malloc9"),))
    beyond = dataclasses.replace(
        with_shelf(
            namespaces=(*SHELF.namespaces, Namespace(7, "Malloc9")),
            listeners=(LISTENER, Address("TCP", "10.0.0.9", "4420")),
            hosts=(*SHELF.hosts, Host("nqn.stranger")),
        ),
        keys=(*AS_DESCRIBED.keys, Key("old")),
        bdevs=(*AS_DESCRIBED.bdevs, Bdev("Malloc9", "malloc", 512, 1), Bdev("N0n1", "nvme", 512, 1)),
        nvme=(NvmeController("N0"),),
    )
    beyond = dataclasses.replace(beyond, subsystems=(*beyond.subsystems, other))
    found = plan(described(), beyond)
    assert found.steps == ()
    assert found.left_alone == (
        f"namespace 7 of {NQN}",
        f"host nqn.stranger of {NQN}",
        f"listener TCP 10.0.0.9:4420 of {NQN}",
        "subsystem nqn.2026-01.io.g35:other",
        "NVMe controller N0",
        "malloc bdev Malloc9",
        "key old",
    )
    pruned = plan(described(), beyond, prune=True)
    assert pruned.left_alone == ()
    assert pruned.steps == (
        RemoveHost(NQN, "nqn.stranger"),
        RemoveNamespace(NQN, 7),
        RemoveListener(NQN, Address("TCP", "10.0.0.9", "4420")),
        DeleteSubsystem("nqn.2026-01.io.g35:other"),
        DeleteBdev("nvme", "N0"),
        DeleteBdev("malloc", "Malloc9"),
        RemoveKey("old"),
    )


def test_what_the_description_builds_on_is_not_pruned() -> None:
    text = TEXT.replace('bdev = "Aio0"', 'bdev = "N0n1"').replace('name = "Aio0"', 'name = "Aio2"')
    present = dataclasses.replace(
        with_shelf(namespaces=(SHELF.namespaces[0], Namespace(2, "N0n1"))),
        bdevs=(MALLOC, Bdev("N0n1", "nvme", 512, 1), Bdev("Base", "aio", 512, 1)),
        nvme=(NvmeController("N0"),),
        lvol_stores=(LvolStore("old", "Base", 4 << 20),),
    )
    found = plan(described(text), present, prune=True)
    assert found.steps == (CreateAio("Aio2", "/srv/disk", 512),)
    built_on = "NVMe controller N0, on which described things are built"
    assert found.left_alone == (built_on, "lvol store old")


FAR = Address("TCP", "10.0.0.9", "4420")
VOLUMES = """
[[keys]]
name = "k"
file = "/etc/keys/k"

[[aio]]
name = "Base"
file = "/srv/base"

[[nvme]]
name = "N3"
transport = "tcp"
address = "10.0.0.9"
nqn = "nqn.2026-01.io.g35:far"
host_nqn = "nqn.2026-01.io.g35:me"
key = "k"

[[lvol_stores]]
name = "lvs"
bdev = "Base"

[[lvols]]
name = "one"
store = "lvs"
size = "10M"
thin = true
"""


def test_new_bdevs_are_examined_before_a_store_is_made() -> None:
    """What they carry is then found and not overwritten: the plan is made anew after the examination."""
    assert steps_of(VOLUMES, Present()) == (
        AddKey("k", "/etc/keys/k"),
        CreateAio("Base", "/srv/base", 4096),
        AttachNvme("N3", FAR, "nqn.2026-01.io.g35:far", "nqn.2026-01.io.g35:me", "k", None),
        WaitForExamine(),
        CreateLvolStore("lvs", "Base", None),
        CreateLvol("lvs", "one", 10, True),
    )  # fmt: skip
    base = (Bdev("Base", "aio", 4096, 1 << 20, filename="/srv/base"),)
    controller = (NvmeController("N3", FAR),)
    store = (LvolStore("lvs", "Base", 4 << 20),)
    keys = (Key("k", "/etc/keys/k"),)
    empty = Present(keys=keys, bdevs=base, nvme=controller)
    assert [type(step) for step in steps_of(VOLUMES, empty)] == [CreateLvolStore, CreateLvol]
    volume = Bdev("uuid-of-it", "lvol", 4096, (12 << 20) // 4096, aliases=("lvs/one",))
    found = Present(keys=keys, bdevs=(*base, volume), nvme=controller, lvol_stores=store)
    assert steps_of(VOLUMES, found) == ()
    assert steps_of(VOLUMES.replace("10M", "20M"), found) == (ResizeLvol("lvs/one", 20),)
    with pytest.raises(PlanConflict, match="shrink"):
        steps_of(VOLUMES.replace("10M", "4M"), found)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('size = "1M"', 'size = "2M"', "Malloc0 is there with size 1 MiB, not 2 MiB"),
        ('file = "/srv/disk"', 'file = "/srv/other"', "Aio0 is there with file"),
        ("block_size = 512", "block_size = 4096", "block_size"),
        ('serial = "S1"', 'serial = "S2"', "serial 'S1', not 'S2'"),
        ('serial = "S1"', 'model = "another"', "model"),
        ('"8K"', '"16K"', "in_capsule_data_size 8 KiB, not 16 KiB"),
    ],
)
def test_what_cannot_be_changed_in_place_is_a_conflict(old: str, new: str, part: str) -> None:
    with pytest.raises(PlanConflict, match=part):
        steps_of(TEXT.replace(old, new, 1), AS_DESCRIBED)


@pytest.mark.parametrize(
    ("old", "new", "said", "remedy"),
    [
        ('size = "1M"', 'size = "2M"', "", "choose another name"),
        ('"8K"', '"16K"', "", "only a restart"),
        (
            'bdev = "Malloc0"',
            'bdev = "Maloc0"',
            "no bdev Maloc0 (did you mean Malloc0?)",
            "g35 enclosure show",
        ),
        ('key = "host-1"', 'key = "hots-1"', "no key hots-1 (did you mean host-1?)", "describe one"),
    ],
)
def test_a_conflict_has_a_remedy_that_helps(old: str, new: str, said: str, remedy: str) -> None:
    with pytest.raises(PlanConflict) as refused:
        steps_of(TEXT.replace(old, new, 1), AS_DESCRIBED)
    assert said in refused.value.message
    assert remedy in refused.value.advice
    assert "--prune" not in refused.value.advice


def test_calls_are_those_of_the_schema() -> None:
    host = AddHost(NQN, Host(HOST, "k", "c"))
    assert host.call().params == {
        "nqn": NQN, "host": HOST, "dhchap_key": "k", "dhchap_ctrlr_key": "c",
    }  # fmt: skip
    assert SetKeys(NQN, Host(HOST, "k")).call().params == {"nqn": NQN, "host": HOST, "dhchap_key": "k"}
    assert CreateTransport("TCP", (("max_io_size", 131072),)).call().params == {
        "trtype": "TCP", "max_io_size": 131072,
    }  # fmt: skip
    assert AddNamespace(NQN, Namespace(3, "B", NGUID)).call().params == {
        "nqn": NQN, "namespace": {"nsid": 3, "bdev_name": "B", "nguid": NGUID.upper()},
    }  # fmt: skip
    assert AddKey("k", "/f").call().method == "keyring_file_add_key"
    assert CreateMemory("malloc", "m", 512, 8, None).call().params == {
        "name": "m", "block_size": 512, "num_blocks": 8,
    }  # fmt: skip
    assert CreateSubsystem(NQN, None, None, None, True).call().params == {
        "nqn": NQN, "allow_any_host": True,
    }  # fmt: skip
    ssd = AttachNvme("N0", Address("PCIE", "0000:3b:00.0"), None, None, None, None)
    assert ssd.call().params == {"name": "N0", "trtype": "PCIE", "traddr": "0000:3b:00.0"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (TEXT + "colour = 1", "subsystems.0.hosts.0.colour: unknown key"),
        (TEXT.replace("nsid = 2", "nsid = 1"), "two times the same namespace id"),
        (TEXT.replace('name = "Aio0"', 'name = "Malloc0"'), "two times the same bdev"),
        (TEXT.replace(NGUID.upper(), "0" * 32), "NGUID"),
        (TEXT.replace('"/srv/disk"', '"disk"'), "absolute"),
        (TEXT.replace('"10.0.0.7"', '"localhost"'), "listeners.0"),
        (TEXT.replace('serial = "S1"', "allow_any_host = true"), "choose one"),
        (TEXT.replace("block_size = 512", "block_size = 520"), "block_size"),
        (TEXT.replace('size = "1M"', "size = 1000"), "whole number of blocks"),
        (TEXT.replace("nqn.2026-01.io.g35:shelf-1", "shelf-1"), "subsystems.0.nqn"),
        (TEXT.replace('key = "host-1"', 'controller_key = "c"'), "without a key"),
    ],
)
def test_a_description_that_is_wrong_says_where(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        described(text)


def test_every_key_of_a_description_is_in_the_document(repository: Path) -> None:
    page = (repository / "docs/enclosures.md").read_text()
    table = page.partition("| section | keys")[2].partition("## What apply")[0]
    for name, info in Description.model_fields.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `[[{name}]]`"))
        for key, field in get_args(info.annotation)[0].model_fields.items():
            inner = get_args(field.annotation)
            if inner and hasattr(inner[0], "model_fields"):
                of = f"| `[[{name}.{key}]]`"
                nested = next(line for line in table.splitlines() if line.startswith(of))
                assert all(f"`{each}`" in nested for each in inner[0].model_fields)
            else:
                assert f"`{key}`" in row


def test_a_secret_in_the_place_of_a_name_is_not_repeated() -> None:
    secret = "DHHC-1:00:c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNl:"
    with pytest.raises(ConfigError) as caught:
        described(TEXT.replace('key = "host-1"', f'key = "{secret}"'))
    assert "c2VjcmV0" not in str(caught.value) + caught.value.advice


_NAMES = st.sampled_from(["A", "B", "C"])
_BDEVS = tuple(Bdev(name, "other", 512, 8) for name in "ABC")


@given(
    namespaces=st.lists(_NAMES, unique=True).map(lambda names: dict(enumerate(names, 1))),
    present_namespaces=st.dictionaries(st.integers(1, 4), _NAMES),
    hosts=st.sets(_NAMES),
    present_hosts=st.sets(_NAMES),
    prune=st.booleans(),
)
def test_a_plan_carried_out_leaves_nothing_to_do(
    namespaces: dict[int, str],
    present_namespaces: dict[int, str],
    hosts: set[str],
    present_hosts: set[str],
    prune: bool,
) -> None:
    wanted = parse_description(
        {
            "subsystems": [
                {
                    "nqn": NQN,
                    "namespaces": [{"nsid": nsid, "bdev": bdev} for nsid, bdev in namespaces.items()],
                    "hosts": [{"nqn": f"nqn.{each}"} for each in sorted(hosts)],
                }
            ]
        },
        "test",
    )
    there = Subsystem(
        NQN,
        namespaces=tuple(Namespace(nsid, bdev) for nsid, bdev in present_namespaces.items()),
        hosts=tuple(Host(f"nqn.{each}") for each in sorted(present_hosts)),
    )
    present = Present(bdevs=_BDEVS, subsystems=(there,))
    try:
        steps = plan(wanted, present, prune=prune).steps
    except PlanConflict:
        staying = [bdev for nsid, bdev in present_namespaces.items() if nsid not in namespaces]
        assert not prune
        assert set(staying) & set(namespaces.values())
        return
    served, allowed = dict(present_namespaces), {f"nqn.{each}" for each in present_hosts}
    for step in steps:
        match step:
            case AddNamespace(_, namespace):
                assert namespace.nsid not in served
                served[namespace.nsid] = namespace.bdev
            case RemoveNamespace(_, nsid):
                del served[nsid]
            case AddHost(_, host):
                assert host.nqn not in allowed
                allowed.add(host.nqn)
            case RemoveHost(_, host_nqn):
                allowed.remove(host_nqn)
            case _:
                pytest.fail(f"{step} was not asked for")
    assert namespaces.items() <= served.items()
    assert {f"nqn.{each}" for each in hosts} <= allowed
    if prune:
        assert served == namespaces
        assert allowed == {f"nqn.{each}" for each in hosts}
    now = Subsystem(
        NQN,
        namespaces=tuple(Namespace(nsid, bdev) for nsid, bdev in served.items()),
        hosts=tuple(Host(nqn) for nqn in sorted(allowed)),
    )
    assert plan(wanted, Present(bdevs=_BDEVS, subsystems=(now,)), prune=prune).steps == ()
