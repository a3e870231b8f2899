"""nvmet as a back-end of `apply`: the same descriptions, over a configfs that keeps the kernel's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.enclosure_control.apply import ApplyFailed, apply, planned
from agent.enclosure_control.configfs_files import ConfigfsError, ConfigfsFiles, Write
from agent.enclosure_control.configfs_target import ConfigfsTarget
from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.records import Address
from agent.enclosure_control.steps import AddNamespace
from agent.errors import Fault, UserError
from nvmeof.authentication.secret import DhchapSecret
from nvmeof.authentication.secret_files import write_secret_file
from tests.support.nvme.fake_nvmet import FakeNvmet

NQN = "nqn.2026-01.io.g35:shelf-1"
OTHER = "nqn.2026-01.io.g35:shelf-2"
HOST = "nqn.2026-01.io.g35:host-1"
NGUID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def nvmet(tmp_path: Path) -> FakeNvmet:
    for name in ("disk-a", "disk-b"):
        (tmp_path / name).write_bytes(b"")
    for name, byte in (("key-1", b"1"), ("key-2", b"2"), ("key-c", b"c")):
        write_secret_file(tmp_path / name, DhchapSecret(byte * 32))
    return FakeNvmet(tmp_path / "nvmet")


@pytest.fixture
def target(nvmet: FakeNvmet) -> ConfigfsTarget:
    return ConfigfsTarget(nvmet.root, nvmet)


def document(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    subsystem: dict[str, Any] = {
        "nqn": NQN,
        "serial": "S1",
        "model": "g35 shelf",
        "namespaces": [{"nsid": 1, "bdev": "A", "nguid": NGUID}],
        "listeners": [{"address": "10.0.0.7"}],
        "hosts": [{"nqn": HOST}],
    }
    return {
        "transports": [{"type": "tcp", "in_capsule_data_size": "16K"}],
        "keys": [{"name": f"key-{n}", "file": str(tmp_path / f"key-{n}")} for n in ("1", "2", "c")],
        "aio": [{"name": n.upper(), "file": str(tmp_path / f"disk-{n}")} for n in ("a", "b")],
        "subsystems": [subsystem | changes],
    }


def described(tmp_path: Path, **changes: Any) -> Description:
    return parse_description(document(tmp_path, **changes), "test")


def test_apply_makes_it_so_and_a_second_one_writes_nothing(
    nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path
) -> None:
    wanted = described(tmp_path)
    assert [str(step) for step in apply(target, wanted).done] == [
        f"create subsystem {NQN}",
        f"{NQN}: add namespace 1 on A",
        f"{NQN}: allow host {HOST}",
        f"{NQN}: listen at TCP 10.0.0.7:4420",
    ]
    folder = nvmet.root / "subsystems" / NQN
    assert (folder / "namespaces/1/enable").read_text() == "1\n"
    assert (folder / "namespaces/1/device_path").read_text() == f"{tmp_path / 'disk-a'}\n"
    assert (folder / "namespaces/1/device_nguid").read_text() == "01234567-89ab-cdef-0123-456789abcdef\n"
    assert (nvmet.root / "ports/1/param_inline_data_size").read_text() == "16384\n"
    assert (nvmet.root / "ports/1/subsystems" / NQN).resolve() == folder
    nvmet.done.clear()
    assert apply(target, wanted).done == ()
    assert apply(ConfigfsTarget(nvmet.root, nvmet), wanted, prune=True).done == ()
    assert nvmet.done == []
    [shown] = target.read(wanted).subsystems
    assert (shown.serial, shown.model, shown.max_namespaces) == ("S1", "g35 shelf", None)
    assert shown.listeners == (Address("TCP", "10.0.0.7", "4420"),)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"namespaces": [{"nsid": 1, "bdev": "B", "nguid": NGUID}]}, ["RemoveNamespace", "AddNamespace"]),
        ({"hosts": [{"nqn": HOST, "key": "key-1"}]}, ["SetKeys"]),
        ({"hosts": [{"nqn": HOST}, {"nqn": "nqn.more"}]}, ["AddHost"]),
        ({"listeners": [{"address": "10.0.0.7"}, {"address": "fd00::7"}]}, ["AddListener"]),
    ],
)
def test_a_change_of_one_thing(
    target: ConfigfsTarget, tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    apply(target, described(tmp_path))
    changed = described(tmp_path, **changes)
    assert [type(step).__name__ for step in apply(target, changed).done] == expected
    assert apply(target, changed).done == ()


def test_keys_are_the_contents_of_their_files_and_are_not_shown(
    nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path
) -> None:
    hosts = [{"nqn": HOST, "key": "key-1", "controller_key": "key-c"}]
    wanted = described(tmp_path, hosts=hosts)
    shown = "\n".join(target.show(planned(target, wanted).steps))
    assert f"echo (the key in {tmp_path / 'key-1'}) > {nvmet.root}/hosts/{HOST}/dhchap_key" in shown
    assert "DHHC-1" not in shown
    apply(target, wanted)
    assert (nvmet.root / "hosts" / HOST / "dhchap_key").read_text().startswith("DHHC-1:00:")
    assert (nvmet.root / "hosts" / HOST / "dhchap_dhgroup").read_text() == "ffdhe2048\n"
    assert not [each for each in nvmet.done if "DHHC-1" in f"{each} {each!r}"]
    assert [each for each in nvmet.done if isinstance(each, Write) and "DHHC-1" in each.value]
    assert apply(target, wanted).done == ()
    hosts[0]["key"] = "key-2"
    assert len(apply(target, described(tmp_path, hosts=hosts)).done) == 1
    # A key that the description does not know is another key.
    (nvmet.root / "hosts" / HOST / "dhchap_key").write_text("DHHC-1:00:somebody else's:\n")
    assert len(apply(target, described(tmp_path, hosts=hosts)).done) == 1
    # Without a key: the host goes and comes, for nvmet keeps the secret as long as the host is there.
    assert len(apply(target, described(tmp_path)).done) == 2
    assert (nvmet.root / "hosts" / HOST / "dhchap_key").read_text() == "\n"


def test_a_key_that_others_may_read_is_refused(target: ConfigfsTarget, tmp_path: Path) -> None:
    (tmp_path / "key-1").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        apply(target, described(tmp_path))


def test_prune_takes_away_what_is_not_described_and_no_more(
    nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path
) -> None:
    both = document(tmp_path)
    both["subsystems"].append(both["subsystems"][0] | {"nqn": OTHER, "namespaces": []})
    apply(target, parse_description(both, "test"))
    found = planned(target, described(tmp_path))
    assert (found.steps, found.left_alone) == ((), (f"subsystem {OTHER}",))
    apply(target, described(tmp_path), prune=True)
    assert [each.name for each in (nvmet.root / "subsystems").iterdir()] == [NQN]
    assert (nvmet.root / "hosts" / HOST).exists(), "the other subsystem uses it"
    assert (nvmet.root / "ports/1").exists()
    apply(target, parse_description({}, "test"), prune=True)
    assert [list((nvmet.root / name).iterdir()) for name in ("subsystems", "ports", "hosts")] == [[], [], []]


@pytest.mark.parametrize("refused", ["attr_serial", "enable", "dhchap_key", "addr_trsvcid"])
def test_a_step_that_is_refused_leaves_nothing_half_made(
    nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path, refused: str
) -> None:
    wanted = described(tmp_path, hosts=[{"nqn": HOST, "key": "key-1"}])
    nvmet.fail_at = refused
    with pytest.raises(ApplyFailed, match=r"EINVAL.*done") as caught:
        apply(target, wanted)
    assert isinstance(caught.value.error, ConfigfsError)
    assert "DHHC-1" not in str(caught.value)
    nvmet.fail_at = ""
    done = len(caught.value.done)
    assert len(apply(target, wanted).done) == 4 - done
    assert apply(target, wanted).done == ()


def test_a_namespace_that_was_left_disabled_is_made_anew(
    nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path
) -> None:
    apply(target, described(tmp_path))
    (nvmet.root / "subsystems" / NQN / "namespaces/1/enable").write_text("0\n")
    assert len(apply(target, described(tmp_path)).done) == 2


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"malloc": [{"name": "M", "size": "1M"}]}, r"no \[\[malloc\]\]"),
        ({"transports": [{"type": "tcp", "max_io_size": "1M"}]}, "max_io_size"),
        ({"aio": []}, r"no \[\[aio\]\] A"),
    ],
)
def test_what_nvmet_has_not_is_said_before_anything_is_done(
    nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError, match=part):
        apply(target, parse_description(document(tmp_path) | changes, "test"))
    assert nvmet.done == []


def test_one_host_has_one_key(target: ConfigfsTarget, tmp_path: Path) -> None:
    whole = document(tmp_path)
    whole["subsystems"].append(
        whole["subsystems"][0] | {"nqn": OTHER, "namespaces": [], "hosts": [{"nqn": HOST, "key": "key-1"}]}
    )
    with pytest.raises(UserError, match="has two"):
        apply(target, parse_description(whole, "test"))


def test_without_nvmet_the_advice_says_what_is_missing(tmp_path: Path) -> None:
    target = ConfigfsTarget(tmp_path / "none", ConfigfsFiles())
    with pytest.raises(ConfigfsError, match="ENOENT") as caught:
        target.read()
    assert "modprobe nvmet" in caught.value.advice
    assert caught.value.fault is Fault.OURS


def test_a_device_that_is_not_there_is_told(target: ConfigfsTarget, tmp_path: Path) -> None:
    (tmp_path / "disk-a").unlink()
    with pytest.raises(ApplyFailed, match="ENOENT") as caught:
        apply(target, described(tmp_path))
    assert isinstance(caught.value.failed, AddNamespace)


def test_named_hosts_end_for_any_host_with_prune_alone(target: ConfigfsTarget, tmp_path: Path) -> None:
    apply(target, described(tmp_path))
    anybody = described(tmp_path, hosts=[], allow_any_host=True)
    with pytest.raises(UserError, match="named hosts"):
        apply(target, anybody)
    assert len(apply(target, anybody, prune=True).done) == 2
    assert apply(target, anybody, prune=True).done == ()


def test_a_key_is_not_dropped_while_another_subsystem_keeps_the_host(
    target: ConfigfsTarget, tmp_path: Path
) -> None:
    both = document(tmp_path, hosts=[{"nqn": HOST, "key": "key-1"}])
    both["subsystems"].append(both["subsystems"][0] | {"nqn": OTHER, "namespaces": []})
    apply(target, parse_description(both, "test"))
    with pytest.raises(UserError, match="keeps its key"):
        apply(target, described(tmp_path))
    apply(target, described(tmp_path), prune=True)
    assert apply(target, described(tmp_path), prune=True).done == ()


def test_what_is_shown_is_what_is_done(nvmet: FakeNvmet, target: ConfigfsTarget, tmp_path: Path) -> None:
    """Each step after those before it: two new listeners get two ports, a host is made once."""
    places = [{"address": "10.0.0.7"}, {"address": "10.0.0.8"}]
    hosts = [{"nqn": HOST, "key": "key-1"}]
    both = document(tmp_path, listeners=places, hosts=hosts)
    both["subsystems"].append(both["subsystems"][0] | {"nqn": OTHER, "namespaces": []})
    for changed in (both, document(tmp_path), {}, both):
        wanted = parse_description(changed, "test")
        shown = "; ".join(target.show(planned(target, wanted, prune=True).steps))
        nvmet.done.clear()
        apply(target, wanted, prune=True)
        assert shown == "; ".join(str(each) for each in nvmet.done)
    assert len(list((nvmet.root / "ports").iterdir())) == 2


def test_a_name_with_a_slash_is_no_folder(target: ConfigfsTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="slash"):
        apply(target, described(tmp_path, nqn="nqn.2026-01.io.g35:../../x"))


def test_an_attribute_that_the_kernel_lacks_is_told(tmp_path: Path, nvmet: FakeNvmet) -> None:
    with pytest.raises(ConfigfsError, match="ENOENT") as caught:
        nvmet.carry_out([Write(nvmet.root / "hosts" / "dhchap_key", "x")])
    assert "has no dhchap_key" in caught.value.advice
