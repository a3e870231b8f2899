"""The keys of a plan: new keys, and keys whose file changes, with the hosts that use them. Pure.

An enclosure reads a key's file when a host gets the key, and tells the name alone afterwards. A host that
names the right key may still have the old secret, where a run ended in between. A key is therefore exchanged
by way of another name, `NAME~`, which no description may use:

    add NAME~ with the new file; give it to the hosts; remove and add NAME; give it to the hosts; remove NAME~

Wherever this ends early, NAME has another file, or is gone, or a host names NAME~; each brings the rest in
the next run. A new file without a secret is found before any step touches the old key.
"""

import dataclasses
from dataclasses import dataclass
from typing import Final

from agent.enclosure_control.description import Description
from agent.enclosure_control.records import Host, Present, Subsystem
from agent.enclosure_control.steps import AddKey, RemoveKey, SetKeys, Step

ASIDE: Final = "~"


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """`subsystems`: those of the present state, with the keys of their hosts after `steps`."""

    steps: tuple[Step, ...]
    subsystems: tuple[Subsystem, ...]


def plan_keys(description: Description, present: Present) -> KeyPlan:
    """The steps that make the keyring as described."""
    there = {each.name: each for each in present.keys}
    named = set(present.keys_of_hosts())
    new: list[Step] = []
    aside: list[Step] = []
    proper: list[Step] = []
    last: list[Step] = []
    exchanged: set[str] = set()
    moving: set[str] = set()
    for wanted in description.keys:
        key, other = there.get(wanted.name), wanted.name + ASIDE
        right = key is not None and key.path in (None, wanted.file)
        replacing: list[Step] = [] if key is None else [RemoveKey(wanted.name)]
        replacing.append(AddKey(wanted.name, wanted.file))
        used = not named.isdisjoint((wanted.name, other))
        if right and other in named:
            exchanged.add(wanted.name)
        elif not right and used:
            aside += [RemoveKey(other)] if other in there else []
            aside.append(AddKey(other, wanted.file))
            proper += replacing
            last.append(RemoveKey(other))
            exchanged.add(wanted.name)
            moving.add(wanted.name)
            continue
        elif not right:
            new += replacing
        if other in there:
            last.append(RemoveKey(other))
    users = [(subsystem.nqn, host) for subsystem in present.subsystems for host in subsystem.hosts]
    aside += [SetKeys(nqn, _renamed(host, moving, ASIDE)) for nqn, host in users if _uses(host, moving)]
    proper += [SetKeys(nqn, _renamed(host, exchanged, "")) for nqn, host in users if _uses(host, exchanged)]
    return KeyPlan(
        (*new, *aside, *proper, *last),
        tuple(
            dataclasses.replace(each, hosts=tuple(_renamed(host, exchanged, "") for host in each.hosts))
            for each in present.subsystems
        ),
    )


def _proper(name: str | None) -> str | None:
    return name if name is None else name.removesuffix(ASIDE)


def _uses(host: Host, names: set[str]) -> bool:
    return not names.isdisjoint((_proper(host.key), _proper(host.controller_key)))


def _renamed(host: Host, names: set[str], ending: str) -> Host:
    """The same host; each of its keys that is one of `names`, or stands aside for one, gets `ending`."""

    def called(name: str | None) -> str | None:
        proper = _proper(name)
        return name if proper is None or proper not in names else proper + ending

    return Host(host.nqn, called(host.key), called(host.controller_key))
