"""What a plan leaves alone, takes away with `prune`, and says before the first step: keys, bdevs, NGUIDs."""

from __future__ import annotations

import dataclasses

import pytest

from agent.enclosure_control.plan import PlanConflict, plan
from agent.enclosure_control.records import Bdev, Host, Key, Namespace, NvmeController, Present, Subsystem
from agent.enclosure_control.steps import CreateMemory, RemoveKey
from tests.support.nvme.described_shelf import (
    AIO,
    AS_DESCRIBED,
    HOST,
    MALLOC,
    NGUID,
    NQN,
    REPLACED,
    SHELF,
    TEXT,
    described,
    steps_of,
    with_shelf,
)  # fmt: skip


def keys_gone(present: Present, text: str = TEXT) -> list[str]:
    return [step.name for step in steps_of(text, present, prune=True) if isinstance(step, RemoveKey)]


def test_a_key_that_an_attached_controller_may_have_is_not_pruned() -> None:
    text = TEXT.replace('bdev = "Aio0"', 'bdev = "N0n1"').replace('name = "Aio0"', 'name = "Aio2"')
    mine, other = Key("host-1", "/etc/keys/host-1"), Host(f"{HOST}-old", "spare")

    def present(users: int | None, *controllers: str, hosts: tuple[Host, ...] = ()) -> Present:
        return dataclasses.replace(
            with_shelf(namespaces=(SHELF.namespaces[0], Namespace(2, "N0n1")), hosts=(*SHELF.hosts, *hosts)),
            bdevs=(MALLOC, Bdev("N0n1", "nvme", 512, 1)),
            nvme=tuple(NvmeController(name) for name in controllers),
            keys=(mine, Key("spare", "/etc/keys/spare", users=users)),
        )

    assert keys_gone(present(1, "N0"), text) == [], "the one user is no host of a subsystem"
    assert keys_gone(present(None, "N0"), text) == [], "an old target does not count"
    assert keys_gone(present(0, "N0"), text) == ["spare"]
    assert keys_gone(present(1, "N0", hosts=(other,)), text) == ["spare"], "its one user is a host that goes"
    assert keys_gone(present(2, "N0", hosts=(other,)), text) == []
    detached = dataclasses.replace(present(1, "N9"), bdevs=(MALLOC, AIO), subsystems=(SHELF,))
    assert keys_gone(detached) == ["spare"], "the controller is detached before"
    said = plan(described(text), present(1, "N0"), prune=True).left_alone
    assert "key spare, which an attached NVMe controller may have" in said


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (Namespace(7, "Malloc0", "ee" * 16), "bdev Malloc0"),
        (Namespace(7, "Spare", NGUID), f"NGUID {NGUID}"),
    ],
)
def test_a_bdev_or_nguid_of_a_namespace_that_stays_is_a_conflict(new: Namespace, said: str) -> None:
    spare = dataclasses.replace(MALLOC, name="Spare", kind="other", uuid="")
    other = Subsystem(f"{NQN}-other", namespaces=(new,))
    there = dataclasses.replace(
        AS_DESCRIBED,
        bdevs=(*AS_DESCRIBED.bdevs, spare),
        subsystems=(dataclasses.replace(SHELF, namespaces=(SHELF.namespaces[1],)), other),
    )
    with pytest.raises(PlanConflict, match=f"its {said} is that of namespace 7 of {NQN}-other"):
        plan(described(), there)
    assert "AddNamespace" in [type(step).__name__ for step in plan(described(), there, prune=True).steps]


def test_another_id_for_a_bdev_takes_the_old_one_away_first() -> None:
    text = TEXT.replace("nsid = 2", "nsid = 3")
    with pytest.raises(PlanConflict, match="its bdev Aio0 is that of namespace 2"):
        plan(described(text), AS_DESCRIBED)
    assert [type(step).__name__ for step in steps_of(text, AS_DESCRIBED, prune=True)] == REPLACED


def test_a_null_bdev_is_made_as_memory_is_and_ana_is_asked_for_once() -> None:
    text = TEXT.replace("[[malloc]]", "[[null]]").replace(
        'serial = "S1"', 'serial = "S1"\nana_reporting = true'
    )
    steps = steps_of(text, Present())
    assert CreateMemory("null", "Malloc0", 4096, 256, None) in steps
    calls = [step.call() for step in steps]
    assert ("bdev_null_create", {"name": "Malloc0", "block_size": 4096, "num_blocks": 256}) in [
        (call.method, call.params) for call in calls
    ]
    [made] = [call.params for call in calls if call.method == "nvmf_create_subsystem"]
    assert made["ana_reporting"] is True
    with pytest.raises(PlanConflict, match="is there with kind malloc, not null"):
        plan(described(text), AS_DESCRIBED)
