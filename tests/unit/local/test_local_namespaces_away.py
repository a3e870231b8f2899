"""One SSD that is missing, bad or silent leaves the others served, and is served once it comes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.config.local_section import LocalSection
from agent.errors import ConfigError, G35Error, UserError
from agent.local import device as device_module
from agent.local import namespaces as namespaces_module
from agent.local import opening as opening_module
from agent.local import storage as storage_module
from agent.local.device import open_device
from agent.local.label import Label
from agent.local.namespaces import LocalNamespaces
from nvmeof.controller.storage import StorageError
from nvmeof.linux_limits import SureThread
from nvmeof.wire.status import Status
from tests.support.local_rig import free_port
from tests.support.waiting import wait_until

HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001"
MIB = 1 << 20


@pytest.fixture
def port() -> int:
    return free_port()


def section(path: Path, port: int, **keys: object) -> LocalSection:
    return LocalSection.model_validate({"path": path, "export": f"127.0.0.1:{port}", **keys})


def opened(folder: Path, *sections: LocalSection, **how: bool) -> LocalNamespaces:
    return LocalNamespaces(sections, HOST, bytes(16), folder, **how)


def test_a_missing_device_is_away_until_it_comes(tmp_path: Path, port: int) -> None:
    here, gone = section(tmp_path / "here", port, size="8M"), section(tmp_path / "gone", port)
    with opened(tmp_path, here, gone, serve=True) as local:
        assert [each.path.name for each in local.opened] == ["here"]
        (away,) = local.away
        assert away.fault == f"{tmp_path}/gone does not exist"
        with (tmp_path / "made").open("wb") as file:
            file.truncate(8 * MIB)
        (tmp_path / "made").rename(tmp_path / "gone")
        wait_until(lambda: (found := away.look()) is not None and found.path == gone.path, 10, "it to come")
    open_device(gone).close()  # the end has let it go


def test_what_is_loaded_first_takes_none_of_the_time(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0.0

    def load() -> str:
        nonlocal late
        late += 10 * opening_module.OPEN_SECONDS
        return "slowly"

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr(opening_module, "engine", load)
    monkeypatch.setattr(namespaces_module, "time", clock)
    with opened(tmp_path, section(tmp_path / "here", port, size="8M"), make=True) as local:
        assert [each.path.name for each in local.opened] == ["here"]


def test_a_device_that_does_not_answer_holds_up_nobody(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = [section(tmp_path / name, port, size="8M") for name in ("here", "hangs")]
    with opened(tmp_path, *sections, make=True):
        pass
    real, goes_on, number = os.pread, threading.Event(), (tmp_path / "hangs").stat().st_ino

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == number:
            goes_on.wait()
        return real(descriptor, length, offset)

    monkeypatch.setattr(device_module.os, "pread", pread)
    monkeypatch.setattr(namespaces_module, "OPEN_SECONDS", 0.2)
    with opened(tmp_path, *sections, serve=True) as local:
        assert [each.path.name for each in local.opened] == ["here"]
        (away,) = local.away
        assert away.look() is None
        assert "does not answer" in away.fault
        goes_on.set()
        wait_until(lambda: away.look() is not None, 10, "its answer")
    goes_on.clear()
    local = opened(tmp_path, sections[1], serve=True)
    with local:
        (away,) = local.away
    goes_on.set()  # what is opened after the end is closed again

    def is_free() -> bool:
        try:
            open_device(sections[1]).close()
        except G35Error:
            return False
        return True

    wait_until(is_free, 10, "the device to be let go")


def test_a_wrong_configuration_ends_the_start(tmp_path: Path, port: int) -> None:
    (tmp_path / "folder").mkdir()
    for path, keys, said in (
        (tmp_path / "folder", {}, "is a folder"),
        (tmp_path / "small", {"size": "2M"}, "too few"),
    ):
        with pytest.raises(UserError, match=said):
            opened(tmp_path, section(path, port, **keys), serve=True)
    held = open_device(section(tmp_path / "held", port, size="8M"))
    with pytest.raises(G35Error, match="another process uses"):
        opened(tmp_path, section(tmp_path / "held", port), serve=True)
    held.close()


def test_a_hosts_file_is_read_before_a_device_gets_a_label(tmp_path: Path, port: int) -> None:
    wrong = section(tmp_path / "ssd", port, size="8M", hosts_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="hosts_file"):
        opened(tmp_path, wrong, serve=True)
    assert not (tmp_path / "ssd").exists()


def test_a_namespace_that_an_agent_served_is_not_replaced(tmp_path: Path, port: int) -> None:
    ssd = section(tmp_path / "ssd", port, size="8M")
    with opened(tmp_path, ssd, serve=True) as local:
        nguid = local.opened[0].namespace.nguid.hex()
    (tmp_path / "ssd").unlink()
    with opened(tmp_path, ssd, serve=True) as local:
        assert nguid in local.away[0].fault
    (tmp_path / "ssd").touch()
    with pytest.raises(UserError, match=f"{nguid}: it is empty"):
        opened(tmp_path, ssd, serve=True)
    assert not (tmp_path / "ssd").stat().st_size


@pytest.mark.expects_log("ssd is not made yet; start the agent")
def test_a_verb_makes_nothing_unless_it_formats(tmp_path: Path, port: int) -> None:
    ssd = section(tmp_path / "ssd", port, size="8M")
    with opened(tmp_path, ssd) as local:
        assert (local.opened, local.away) == ([], [])
    assert not any(tmp_path.iterdir())
    with opened(tmp_path, ssd, make=True) as local:
        assert len(local.opened) == 1


def served(local: LocalNamespaces, port: int) -> dict[str, list[int]]:
    """What hosts see at a port: namespace ids by subsystem."""
    assert local.export is not None
    target = local.export._targets["127.0.0.1", port]
    assert [each.nqn for each in target.subsystems] == [each.subsystem_nqn for each in target.ports]
    return {each.nqn: list(each.namespaces) for each in target.subsystems}


def test_a_device_that_is_pulled_is_away_until_it_is_back(tmp_path: Path, port: int) -> None:
    ssd = section(tmp_path / "ssd", port, size="8M")
    with opened(tmp_path, ssd, serve=True) as local:
        (first,) = local.opened
        away = local.pulled(first)
        with pytest.raises(StorageError) as told:
            first.storage.flush()
        assert told.value.status == Status.NAMESPACE_NOT_READY
        assert away.fault == f"{tmp_path}/ssd is gone"
        assert served(local, port) == {first.nqn: []}
        assert first.storage.close()
        (tmp_path / "ssd").rename(tmp_path / "pulled")
        wait_until(lambda: away.look() is None and "it is gone, and" in away.fault, 10, "a look")
        (tmp_path / "pulled").rename(tmp_path / "ssd")
        again = wait_until(lambda: away.look(), 10, "it to be back")
        assert again is not None
        assert (again.nqn, again.namespace) == (first.nqn, first.namespace)
        assert served(local, port) == {first.nqn: [1]}
        again.storage.flush()

        other = section(tmp_path / "other", port, size="8M")
        open_device(other).close()
        away = local.pulled(again)
        assert again.storage.close()
        (tmp_path / "other").rename(tmp_path / "ssd")
        swapped = wait_until(lambda: away.look(), 10, "the other one")
        assert swapped is not None
        assert swapped.nqn != first.nqn
        assert served(local, port) == {swapped.nqn: [1]}
    open_device(ssd).close()  # the end has let it go
    with pytest.raises(StorageError):
        swapped.storage.flush()


def test_a_device_that_is_pulled_waits_for_its_last_write(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "CLOSE_SECONDS", 0.05)
    real, hangs, goes_on = os.pwrite, threading.Event(), threading.Event()

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        hangs.set()
        assert goes_on.wait(30)
        return real(descriptor, data, offset)

    with opened(tmp_path, section(tmp_path / "ssd", port, size="8M"), serve=True) as local:
        (first,) = local.opened
        monkeypatch.setattr(storage_module.os, "pwrite", pwrite)
        writing = threading.Thread(
            target=lambda: first.storage.write(0, memoryview(bytes(4096)), placed=False)
        )
        writing.start()
        assert hangs.wait(30)
        away = local.pulled(first)
        assert not first.storage.close()
        # Its lock stands for as long.
        wait_until(lambda: away.look() is None and "another process uses" in away.fault, 10, "a look")
        goes_on.set()
        writing.join(30)
        assert first.storage.close()
        assert first.storage.close()
        wait_until(lambda: away.look() is not None, 10, "it to be back")


def test_without_a_thread_to_open_it_a_device_is_away(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of strangers may have all that the unit's TasksMax allows."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ssd = section(tmp_path / "ssd", port, size="8M")
    with monkeypatch.context() as strict:
        strict.setattr(SureThread, "start", refuse)
        with opened(tmp_path, ssd, make=True) as local:
            (away,) = local.away
            assert away.look() is None
            assert away.fault == f"no thread to open {tmp_path}/ssd: can't start new thread"
            strict.undo()
            wait_until(lambda: away.look() is not None, 10, "a thread")


def test_a_verb_beside_an_agent_waits_for_no_hung_device(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssd, goes_on = section(tmp_path / "ssd", port, size="8M"), threading.Event()
    with opened(tmp_path, ssd, serve=True) as local:
        (served,) = local.opened
        with opened(tmp_path, ssd) as verb:
            assert [each.nqn for each in verb.elsewhere] == [served.nqn]

        def hang(path: Path) -> Label:
            goes_on.wait()
            return served.storage.device.label

        monkeypatch.setattr(opening_module, "read_label", hang)
        monkeypatch.setattr(opening_module, "OPEN_SECONDS", 0.1)
        # The agent has noted it in the state folder, which its verbs have too.
        with opened(tmp_path, ssd) as verb:
            assert [each.nqn for each in verb.elsewhere] == [served.nqn]
        (tmp_path / "other").mkdir()
        with pytest.raises(G35Error, match="does not answer while its label is read"):
            opened(tmp_path / "other", ssd)
        goes_on.set()
