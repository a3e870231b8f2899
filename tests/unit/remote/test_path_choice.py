"""Paths in the configuration and in the fabric, and the fence by itself."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.status_verb import _state
from agent.config.configuration import EnclosureSection, parse_configuration, parse_path
from agent.errors import ConfigError
from agent.remote.enclosure import AVOID_MOST_SECONDS, Enclosure, Route
from agent.remote.fabric import Fabric
from agent.remote.fence import COMMAND_SECONDS, GRAIN, LOST_SECONDS, MOST_PLACES, Fence, GivenUp
from agent.remote.path_choice import in_order, path_failed
from agent.telemetry.snapshot import _enclosures
from nvmeof.host import commands
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.transport.base import ControllerInfo
from nvmeof.wire.ana import AnaState
from nvmeof.wire.status import Status

NGUID, OTHER = bytes(range(1, 17)), bytes(range(2, 18))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:4420", ("10.0.0.1", 4420)),
        ("[fd00::1]:1", ("fd00::1", 1)),
        ("shelf:9", ("shelf", 9)),
    ],
)
def test_a_path(text: str, found: tuple[str, int]) -> None:
    assert parse_path(text) == found


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1", ":4420", "fd00::1:4420", "[fd00::1]", "[10.0.0.1:1", "[a]:1", "a:0", "a:65536", "a:²"],
)
def test_no_path(text: str) -> None:
    with pytest.raises(ValueError, match=r"ADDRESS:PORT|between 1 and 65535"):
        parse_path(text)


def test_a_section_for_each_path() -> None:
    section = EnclosureSection(
        name="shelf", address="10.0.1.7", nqn="nqn.2026-01.shelf", data_digest=True, paths=("[fd00::7]:4421",)
    )
    first, second = section.each_path()
    assert (first.name, first.address, first.port, first.paths) == ("shelf", "10.0.1.7", 4420, ())
    assert (second.name, second.address, second.port, second.paths) == ("shelf#2", "fd00::7", 4421, ())
    assert second.nqn == section.nqn
    assert second.data_digest


def test_a_fence_stands_around_its_place_for_its_time() -> None:
    fence = Fence()
    assert not fence.stands(NGUID, 0, 4096, 0.0)
    fence.put_up(NGUID, 8192, 4096, 12.0, 0.0)
    assert fence.stands(NGUID, 8192, 4096, 11.9)
    assert fence.stands(NGUID, 0, 8193, 1.0)
    assert fence.stands(NGUID, 12287, 1, 1.0)
    assert not fence.stands(NGUID, 0, 8192, 1.0)
    assert not fence.stands(NGUID, 12288, 4096, 1.0)
    assert not fence.stands(OTHER, 8192, 4096, 1.0)
    fence.put_up(NGUID, 8192, 4096, 5.0, 1.0)
    assert fence.stands(NGUID, 8192, 4096, 11.9), "the longer one counts"
    assert not fence.stands(NGUID, 8192, 4096, 12.0)


def session() -> Enclosure:
    return Enclosure("shelf", cast(ControllerInfo, object()), epoch=3)


def test_a_fence_falls_with_the_answers_of_what_was_given_up() -> None:
    fence, given_up, shelf = Fence(), [commands.flush(1), commands.flush(1)], session()
    fence.put_up(NGUID, 0, 4096, 60.0, 0.0, GivenUp(given_up[:1], shelf, 3))
    fence.put_up(NGUID, 0, 4096, 60.0, 0.0, GivenUp(given_up[1:], shelf, 3))
    given_up[0].answered_late = True
    assert fence.stands(NGUID, 0, 1, 1.0), "the other may still land"
    given_up[1].answered_late = True
    assert not fence.stands(NGUID, 0, 1, 1.0)
    fence.put_up(NGUID, 0, 4096, 13.0, 1.0)
    assert fence.stands(NGUID, 0, 1, 2.0), "one that was lost is never answered"
    fence.put_up(NGUID, 0, 4096, 60.0, 2.0, GivenUp(given_up, shelf, 3))
    assert fence.stands(NGUID, 0, 1, 12.9)
    assert not fence.stands(NGUID, 0, 1, 13.0)


@pytest.mark.parametrize("ended", ["queue", "session", "next session"])
def test_a_fence_stands_until_the_queue_of_what_was_given_up_is_gone(ended: str) -> None:
    fence, write, shelf = Fence(), commands.flush(1), session()
    fence.put_up(NGUID, 0, 4096, 60.0, 0.0, GivenUp([write], shelf, 3))
    assert fence.stands(NGUID, 0, 1, 3600.0), "its queue stalls, and whoever owns it has nothing to do there"
    if ended == "queue":
        write.orphaned = True
    elif ended == "session":
        shelf.session = None
    else:
        shelf.epoch = 4
    assert fence.stands(NGUID, 0, 1, 4000.0)
    assert fence.stands(NGUID, 0, 1, 4000.0 + LOST_SECONDS - 0.1)
    assert not fence.stands(NGUID, 0, 1, 4000.0 + LOST_SECONDS)


def test_a_session_is_ended_for_a_write_that_is_given_up_for_long() -> None:
    fence, write, other, shelf = Fence(), commands.flush(1), commands.flush(1), session()
    write.submitted_at = other.submitted_at = 5.0
    fence.put_up(NGUID, 0, 4096, 66.0, 6.0, GivenUp([write], shelf, 3))
    fence.put_up(NGUID, 8192, 4096, 66.0, 6.0, GivenUp([other], shelf, 3))
    fence.look(5.0 + COMMAND_SECONDS - 0.1)
    assert shelf.complaints == 0
    write.answered_late = True
    fence.look(5.0 + COMMAND_SECONDS)
    assert shelf.complaints == 1
    other.answered_late = True
    fence.look(6.0 + COMMAND_SECONDS)
    assert shelf.complaints == 1, "all is answered"
    fence.put_up(OTHER, 0, 4096, 100.0, 40.0, GivenUp([commands.flush(1)], shelf, 2))
    fence.look(60.0)
    assert shelf.complaints == 1, "of a session that is over"


@pytest.mark.parametrize("paths", [("10.0.1.7:4420",), ("10.0.1.8:1", "10.0.1.8:1")])
def test_one_address_is_one_path(paths: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="named twice"):
        EnclosureSection(name="shelf", address="10.0.1.7", nqn="nqn.2026-01.shelf", paths=paths)


def test_two_enclosures_are_not_one_path() -> None:
    def configured(*enclosures: dict[str, object]) -> None:
        named = [{"name": f"shelf-{number}", **each} for number, each in enumerate(enclosures)]
        agent = {"mount": "/m", "state": "/s", "key_file": "/k"}
        parse_configuration({"agent": agent, "enclosures": named}, "it")

    shelf = {"address": "10.0.1.7", "nqn": "nqn.2026-01.shelf"}
    for other in ({"port": 4421}, {"nqn": "nqn.2026-01.other"}, {"transport": "rdma"}):
        configured(shelf, {**shelf, **other})
    for again in (shelf, {**shelf, "address": "10.0.1.8", "paths": ["10.0.1.7:4420"]}):
        with pytest.raises(ConfigError, match="one address, port and NQN"):
            configured(shelf, again)


PLACES = st.tuples(
    st.integers(0, 4 * GRAIN // 4096), st.integers(0, 600), st.integers(1, 9), st.integers(0, 3)
)


@given(st.lists(PLACES, max_size=40), PLACES)
def test_a_fence_finds_what_a_look_at_every_place_finds(
    places: list[tuple[int, int, int, int]], asked: tuple[int, int, int, int]
) -> None:
    fence, now = Fence(), 0.0
    stand: list[tuple[int, int, float]] = []
    for at, blocks, lasts, passed in places:
        now += passed
        fence.put_up(NGUID, at * 4096, blocks * 4096, now + lasts, now)
        stand.append((at * 4096, (at + blocks) * 4096, now + lasts))
    at, blocks, _, passed = asked
    first, end, now = at * 4096, (at + blocks) * 4096, now + passed
    expected = any(start < end and first < stop and until > now for start, stop, until in stand)
    assert fence.stands(NGUID, first, end - first, now) == expected


def test_a_full_fence_looks_at_few_places_for_a_write() -> None:
    fence = Fence()
    for number in range(MOST_PLACES):
        fence.put_up(NGUID, number * GRAIN, 4096, 12.0, 0.0)
    assert fence.stands(NGUID, 7 * GRAIN, 4096, 1.0)
    assert not fence.stands(NGUID, 7 * GRAIN + 4096, GRAIN - 4096, 1.0)
    assert max(map(len, fence._grains.values())) == 1
    fence.put_up(NGUID, 0, 4096, 30.0, 13.0)
    assert len(fence._places) == len(fence._grains) == 1, "those that are free again are gone"


def test_with_too_many_places_the_namespace_is_fenced() -> None:
    fence = Fence()
    for number in range(MOST_PLACES + 1):
        fence.put_up(NGUID, number * 4096, 4096, 12.0, 0.0)
    assert fence.stands(NGUID, 1 << 40, 4096, 11.0)
    assert not fence.stands(OTHER, 0, 4096, 11.0)
    assert not fence.stands(NGUID, 1 << 40, 4096, 12.0)


def test_a_path_that_left_a_request_alone_goes_behind_for_longer_each_time() -> None:
    paths = [Enclosure("shelf"), Enclosure("shelf#2")]
    ways = [Route(path, 1, 4096) for path in paths]
    now = 100.0
    assert in_order(ways, now) == ways
    pauses = []
    for _ in range(8):
        paths[0].avoid(now)
        paths[0].avoid(now + 0.1)
        assert in_order(ways, now + 0.1) == ways[::-1]
        pauses.append(paths[0].avoided_until - now)
        now = paths[0].avoided_until
    assert pauses[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert pauses[-1] == AVOID_MOST_SECONDS
    paths[0].answered(now)
    paths[0].avoid(now)
    assert paths[0].avoided_until - now == pytest.approx(0.5)


def test_two_enclosures_that_claim_one_namespace_are_no_paths_to_it() -> None:
    seen = (NamespaceInfo(1, NGUID, 1 << 20, 4096),)
    both = [
        Enclosure(name, session=object(), nqn=f"nqn.{name}", namespaces=seen)  # type: ignore[arg-type]
        for name in ("one", "another")
    ]
    fabric = Fabric(both)
    fabric.adopt([NGUID])
    assert [way.enclosure.name for way in fabric.ways[0]] == ["one"]
    assert "another shows it as well as one" in fabric.contested[NGUID.hex()]
    assert not any(enclosure.has_other_paths for enclosure in both)


def test_status_names_each_paths_access_and_what_it_left_to_another() -> None:
    paths = [
        Enclosure("shelf", session=object(), access={1: AnaState.NON_OPTIMIZED}),  # type: ignore[arg-type]
        Enclosure("shelf#2"),
    ]
    paths[0].sent_elsewhere = 3
    shown = _enclosures(Fabric(paths))
    assert [(each["access"], each["sent_elsewhere"]) for each in shown] == [(["non_optimized"], 3), ([], 0)]
    assert [_state(each) for each in shown] == [
        "connected, non-optimized, 3 sent elsewhere",
        "away: not connected yet",
    ]


@pytest.mark.parametrize(
    ("status", "of_the_path"),
    [
        (Status.COMMAND_SEQUENCE_ERROR, True),
        (Status.ABORTED_SQ_DELETION, True),
        (Status.ANA_INACCESSIBLE, True),
        (Status.UNRECOVERED_READ_ERROR, False),
        (Status.INVALID_FIELD, False),
        (Status.SUCCESS, False),
    ],
)
def test_what_a_controller_says_that_is_being_reset_is_the_paths(status: Status, of_the_path: bool) -> None:
    command = commands.flush(1)
    command.done, command.status = True, status
    assert path_failed(command) is of_the_path
