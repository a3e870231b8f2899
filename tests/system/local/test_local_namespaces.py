"""A server's own SSDs in the pool: the agent beside them, another agent, and the loss of the server."""

from __future__ import annotations

import json
import shutil
import socket
import uuid
from pathlib import Path

import pytest

from host_shim.control_wire import Outcome
from nvmeof.authentication.secret import new_secret
from tests.support.local_rig import KEYS, LOCAL, LocalRig, free_port, value_of
from tests.support.pool_up import wait_each_served
from tests.support.processes import Processes
from tests.support.waiting import wait_until


@pytest.fixture
def rig(processes: Processes, tmp_path: Path) -> LocalRig:
    return LocalRig(processes, tmp_path)


def test_every_agent_sees_one_namespace_and_its_server_may_go(rig: LocalRig) -> None:
    assert rig.verb("one", "pool", "format")[0] == 0
    rig.configure("two", rig.as_enclosure)
    one = rig.agent("one")
    two = rig.agent("two")
    (row,) = rig.status("one")["enclosures"]
    assert (row["name"], row["connected"], row["local"]) == ("local:ssd", True, True)
    (row,) = rig.status("two")["enclosures"]
    assert (row["connected"], row["local"]) == (True, False)

    with rig.pool("one") as beside, rig.pool("two") as away:
        for key in KEYS:
            assert beside.volume("kv").put(key, value_of(key))
        for pool in (beside, away):
            wait_each_served(pool.volume("kv"), {key: value_of(key) for key in KEYS})
        totals = rig.status("one")["totals"], rig.status("two")["totals"]
        assert totals[0]["local_bytes_read"] == totals[0]["flash_bytes_read"] > 0
        assert totals[1]["local_bytes_read"] == 0 < totals[1]["flash_bytes_read"]

        for key in KEYS[:4]:
            assert away.volume("kv").delete([key]) == [True]
            assert beside.volume("kv").get(key) is None
            assert away.volume("kv").put(key, value_of(key))
            assert beside.volume("kv").get(key) == value_of(key)

        # A verb beside the agent goes by the agent's export: the device is the agent's.
        shown, said = rig.verb("one", "pool", "show", "--json")
        assert (shown, len(json.loads(said)["namespaces"])) == (0, 1), said

        one.kill()
        assert all(away.volume("kv").get(key) in (None, value_of(key)) for key in KEYS)
        wait_until(lambda: not rig.status("two")["enclosures"][0]["connected"], 30, "the loss to be seen")
        buffer = bytearray(1 << 16)
        (lost,) = away.volume("kv").fetch([KEYS[0]], [buffer])
        assert lost.length is None
        assert lost.outcome is Outcome.ENCLOSURE_DOWN

        assert rig.g35("unmount", rig.folder / "mnt-one")[0] == 0
        one = rig.agent("one")
        with rig.pool("one") as again:
            wait_each_served(again.volume("kv"), {key: value_of(key) for key in KEYS})
        wait_until(lambda: rig.status("two")["enclosures"][0]["connected"], 30, "the server to be back")
        wait_until(lambda: away.volume("kv").get(KEYS[0]) == value_of(KEYS[0]), 30, "its values")
    assert two.stop(60) == 0
    assert one.stop(60) == 0
    assert "Traceback" not in one.output + two.output


def test_a_device_is_one_agents_and_one_tables(rig: LocalRig) -> None:
    assert rig.verb("one", "pool", "format")[0] == 0
    one = rig.agent("one")
    hard = rig.folder / "hard"
    hard.hardlink_to(rig.ssd)
    rig.configure("thief", LOCAL.format(path=hard, port=free_port()))
    ended, said = rig.verb("thief", "agent")
    assert ended == 1
    assert f"another process uses {hard}" in said
    ended, said = rig.verb("thief", "pool", "show")  # It looks for that process at its own export.
    assert ended == 1
    assert f"another process uses {hard}, and by its export: " in said
    rig.configure("twice", *(LOCAL.format(path=path, port=rig.port) for path in (rig.ssd, hard)))
    ended, said = rig.verb("twice", "pool", "show")
    assert ended == 1
    assert "two tables of [[local]] name one device" in said
    assert one.stop(60) == 0
    taken = socket.socket()
    with taken:
        taken.bind(("127.0.0.1", rig.port))
        taken.listen()
        ended, said = rig.verb("one", "agent")
    assert ended == 1
    assert "cannot serve local namespaces" in said


def test_the_way_over_loopback_stands_behind_the_one_in_place(rig: LocalRig) -> None:
    """An agent may have the same list of enclosures as all others, its own server among them."""
    assert rig.verb("one", "pool", "format")[0] == 0
    rig.configure("one", LOCAL.format(path=rig.ssd, port=rig.port), rig.as_enclosure)
    one = rig.agent("one")
    rows = {each["name"]: each for each in rig.status("one")["enclosures"]}
    assert rows["local:ssd"]["subsystem"] == rows["server"]["subsystem"]
    with rig.pool("one") as pool:
        for key in KEYS:
            assert pool.volume("kv").put(key, value_of(key))
            assert pool.volume("kv").get(key) == value_of(key)
    totals = rig.status("one")["totals"]
    assert totals["local_bytes_read"] == totals["flash_bytes_read"]
    assert rig.status("one")["pool"]["contested"] == {}
    assert one.stop(60) == 0


def test_a_copy_in_another_server_is_no_second_way_to_the_device(rig: LocalRig) -> None:
    """A clone of the SSD, put into another server: one of the two is in use, and the log names the other."""
    assert rig.verb("one", "pool", "format")[0] == 0
    copy, port = rig.folder / "copy", free_port()
    shutil.copy(rig.ssd, copy)
    rig.configure("other", LOCAL.format(path=copy, port=port))
    one, other = rig.agent("one"), rig.agent("other")
    rig.configure("two", rig.as_enclosure, rig.enclosure("clone", port, rig.nqn("other", copy)))
    two = rig.agent("two")
    wait_until(lambda: rig.status("two")["pool"]["contested"] != {}, 30, "the copy to be seen")
    (said,) = rig.status("two")["pool"]["contested"].values()
    assert said in (
        "clone shows it as well as server: left out",
        "server shows it as well as clone: left out",
    )
    assert [each.stop(60) for each in (two, other, one)] == [0, 0, 0]


def test_other_agents_prove_who_they_are_where_a_hosts_file_says_so(rig: LocalRig) -> None:
    secret, hosts = rig.folder / "secret", rig.folder / "hosts"
    text = new_secret().text()
    for path, content in ((secret, text + "\n"), (hosts, f"nqn.2014-08.org.nvmexpress:uuid:x {text}\n")):
        path.touch(0o600)
        path.write_text(content)
    guarded = LOCAL.format(path=rig.ssd, port=rig.port) + f'hosts_file = "{hosts}"\n'
    rig.configure("one", guarded)
    assert rig.verb("one", "pool", "format")[0] == 0
    state = rig.folder / "state-two"
    state.mkdir()
    state.joinpath("host_id").write_text(f"{uuid.UUID(int=7)}\n")
    rig.configure("two", rig.as_enclosure)
    rig.configure("three", rig.as_enclosure, f'[fabric]\nhost_secret_file = "{secret}"\n')
    rig.folder.joinpath("state-three").mkdir()
    rig.folder.joinpath("state-three/host_id").write_text(f"{uuid.UUID(int=7)}\n")
    hosts.write_text(f"nqn.2014-08.org.nvmexpress:uuid:{uuid.UUID(int=7)} {text}\n")
    one = rig.agent("one")
    ended, said = rig.verb("two", "pool", "show")
    assert ended == 1 or "not connected" in said
    assert "authenticate" in said
    ended, said = rig.verb("three", "pool", "show", "--json")
    assert (ended, len(json.loads(said)["namespaces"])) == (0, 1), said
    assert one.stop(60) == 0
