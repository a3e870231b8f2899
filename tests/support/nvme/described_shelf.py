"""An enclosure that is described and one that is as described, for tests of plans."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.plan import plan
from agent.enclosure_control.records import Address, Bdev, Host, Key, Namespace, Present, Subsystem, Transport
from agent.enclosure_control.steps import Step

NQN = "nqn.2026-01.io.g35:shelf-1"
HOST = "nqn.2026-01.io.g35:host-1"
NGUID = "0123456789abcdef0123456789abcdef"

UUID = "00000000-0000-4000-8000-000000000001"
EXCHANGED = ["AddKey", "SetKeys", "RemoveKey", "AddKey", "SetKeys", "RemoveKey"]
REPLACED = ["RemoveNamespace", "AddNamespace"]

TEXT = f"""
[[transports]]
type = "tcp"
in_capsule_data_size = "8K"

[[keys]]
name = "host-1"
file = "/etc/keys/host-1"

[[malloc]]
name = "Malloc0"
size = "1M"

[[aio]]
name = "Aio0"
file = "/srv/disk"
block_size = 512

[[subsystems]]
nqn = "{NQN}"
serial = "S1"

[[subsystems.namespaces]]
nsid = 1
bdev = "Malloc0"
nguid = "{NGUID.upper()}"

[[subsystems.namespaces]]
nsid = 2
bdev = "Aio0"

[[subsystems.listeners]]
address = "10.0.0.7"

[[subsystems.hosts]]
nqn = "{HOST}"
key = "host-1"
"""

MALLOC = Bdev("Malloc0", "malloc", 4096, 256, "6c9f9309-da0b-53da-a812-5ffdb2e7b085")
AIO = Bdev("Aio0", "aio", 512, 2048, filename="/srv/disk")
LISTENER = Address("TCP", "10.0.0.7", "4420")
SHELF = Subsystem(
    NQN,
    "S1",
    "SPDK bdev Controller",
    32,
    False,
    (Namespace(1, "Malloc0", NGUID), Namespace(2, "Aio0", "ff" * 16)),
    (LISTENER,),
    (Host(HOST, "host-1"),),
)
AS_DESCRIBED = Present(
    (Transport("TCP", (("in_capsule_data_size", 8192), ("max_queue_depth", 128))),),
    (Key("host-1", "/etc/keys/host-1"),),
    (MALLOC, AIO),
    (),
    (),
    (SHELF,),
)


def described(text: str = TEXT) -> Description:
    return parse_description(tomllib.loads(text), "test")


def with_shelf(**changes: Any) -> Present:
    return dataclasses.replace(AS_DESCRIBED, subsystems=(dataclasses.replace(SHELF, **changes),))


def steps_of(text: str, present: Present, *, prune: bool = False) -> tuple[Step, ...]:
    return plan(described(text), present, prune=prune).steps
