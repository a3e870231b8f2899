"""What a discovery log makes of enclosures, and the configuration that names discovery controllers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.config.configuration import DiscoverySection, EnclosureSection, parse_configuration
from agent.errors import ConfigError
from agent.remote import discovery
from agent.remote.discovery import Discovered, enclosures_in, itself
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.log_page import DiscoveryEntry, SubsystemType

POD = DiscoverySection(name="pod", address="10.0.0.1", data_digest=True)
ENTRY = DiscoveryEntry("10.0.0.2", "4420", "nqn.x:one")


def test_an_entry_is_an_enclosure_as_if_it_were_configured() -> None:
    [section] = enclosures_in(POD, [ENTRY, ENTRY])[0].values()
    assert (section.transport, section.address, section.port, section.nqn) == (
        "tcp", "10.0.0.2", 4420, "nqn.x:one",
    )  # fmt: skip
    assert section.name.startswith("pod.")
    assert section.data_digest
    assert enclosures_in(POD, [ENTRY]) == enclosures_in(POD, [ENTRY]), "the name is the same every time"
    [section] = enclosures_in(POD, [replace(ENTRY, address="0.0.0.0")])[0].values()
    assert section.address == "10.0.0.1"
    assert itself(POD).nqn == DISCOVERY_NQN
    assert itself(POD).port == 8009


@pytest.mark.parametrize(
    "wrong",
    [
        {"transport_type": 2},
        {"transport_type": 77},
        {"address_family": 3},
        {"subsystem_type": SubsystemType.REFERRAL},
        {"subsystem_type": SubsystemType.CURRENT_DISCOVERY},
        {"service": "port"},
        {"service": "0"},
        {"subsystem_nqn": ""},
        {"subsystem_nqn": "n" * 300},
        {"subsystem_nqn": "nqn.x:a\nWARNING agent.fake a line of its own"},
        {"subsystem_nqn": "nqn.x:\x1b[31m"},
        {"subsystem_nqn": "nqn.x:\u202e"},
        {"address": "shelf.example.com"},
        {"address": "fe80::1%\x1b[2J"},
    ],
)
def test_what_is_no_way_to_an_enclosure_is_left_out(wrong: dict[str, object]) -> None:
    assert enclosures_in(POD, [replace(ENTRY, **wrong)])[0] == {}  # type: ignore[arg-type]


@pytest.mark.expects_log("no way to an enclosure")
def test_what_is_refused_is_said_once_and_in_characters_that_print(caplog: pytest.LogCaptureFixture) -> None:
    known = Discovered[str]([], lambda section: section.nqn, lambda _: None)
    bad = replace(ENTRY, subsystem_nqn="nqn.x:a\nWARNING agent.fake \x1b[2J\u202e")
    for _ in range(3):
        known.listed(POD, [ENTRY, bad])
    [line] = caplog.messages
    assert line.isprintable()
    assert line.isascii()
    known.listed(POD, [ENTRY])
    known.listed(POD, [ENTRY, bad])
    assert len(caplog.messages) == 2, "it went and came back"
    many = [replace(bad, service=f"x{number}") for number in range(100)]
    known.listed(POD, many)
    assert len(caplog.messages) == 2 + discovery.REFUSED_MAX
    assert len(known) == 1


@pytest.mark.expects_log("the rest is left")
def test_who_is_listed_stays_and_who_is_not_goes_once_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    ended: list[str] = []

    def begin(section: EnclosureSection) -> str:
        begun.append(section.nqn)
        return section.nqn

    configured = EnclosureSection(name="own", address="10.0.0.2", nqn="nqn.x:own")
    known = Discovered[str]([configured], begin, ended.append)
    other = replace(ENTRY, subsystem_nqn="nqn.x:two")
    second = DiscoverySection(name="second", address="10.0.0.9")
    known.listed(POD, [ENTRY, other, replace(ENTRY, subsystem_nqn="nqn.x:own")])
    known.listed(second, [ENTRY])
    assert begun == ["nqn.x:one", "nqn.x:two"]
    known.listed(POD, [])
    known.forget_gone(lambda enclosure: True)
    assert ended == []
    known.forget_gone(lambda enclosure: False)
    assert ended == ["nqn.x:two"], "somebody else lists the other one"
    known.listed(second, [])
    known.listed(POD, [ENTRY])
    known.forget_gone(lambda enclosure: False)
    assert len(known) == 1
    monkeypatch.setattr(discovery, "DISCOVERED_MAX", 1)
    known.listed(POD, [ENTRY, other])
    assert (len(known), begun) == (1, ["nqn.x:one", "nqn.x:two"])


def test_a_configuration_names_enclosures_or_who_knows_them() -> None:
    agent = {"mount": "/mnt", "state": "/s", "key_file": "/k"}
    one = {"name": "pod", "address": "10.0.0.1"}
    assert parse_configuration({"agent": agent, "discovery": one}, "x").discovery[0].port == 8009
    with pytest.raises(ConfigError, match="neither an enclosure nor a discovery"):
        parse_configuration({"agent": agent}, "x")
    with pytest.raises(ConfigError, match="one name"):
        parse_configuration({"agent": agent, "discovery": [one, one]}, "x")
    with pytest.raises(ConfigError, match="host_secret_file"):
        parse_configuration({"agent": agent, "discovery": one | {"controller_secret_file": "/x"}}, "x")
