"""`g35 enclosure apply --configfs` makes the kernel's nvmet what a file describes; its own host connects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvmeof.authentication.secret import new_secret
from nvmeof.authentication.secret_files import write_secret_file
from tests.support.lab import kernel_host
from tests.support.lab.kernel_target import NULL_BLK, NVMET, make_disk, remove_disk
from tests.support.lab.lab_enclosure import read_directly, write_directly
from tests.support.verbs_here import status_of

NQN = "nqn.2026-01.lab:applied"
PORT = 4431
NGUID = "0123456789abcdef0123456789abcdef"
DESCRIPTION = """
[[transports]]
type = "tcp"
in_capsule_data_size = "8K"

[[aio]]
name = "one"
file = "{one}"

[[aio]]
name = "two"
file = "{two}"

[[keys]]
name = "host"
file = "{folder}/host.key"

[[subsystems]]
nqn = "{nqn}"
serial = "LAB35"
model = "g35 lab"

[[subsystems.namespaces]]
nsid = 3
bdev = "{bdev}"
nguid = "{nguid}"

[[subsystems.listeners]]
address = "127.0.0.1"
port = {port}

[[subsystems.hosts]]
nqn = "{host}"
"""


@pytest.fixture
def disks() -> Iterator[tuple[Path, Path]]:
    folders = [NULL_BLK / f"applied{number}" for number in (1, 2)]
    try:
        yield make_disk(folders[0]), make_disk(folders[1], 32)
    finally:
        kernel_host.disconnect_all()
        for folder in folders:
            remove_disk(folder)


def test_nvmet_becomes_what_is_described(
    disks: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = tmp_path / "shelf.toml"
    write_secret_file(tmp_path / "host.key", new_secret())
    secret = (tmp_path / "host.key").read_text().strip()

    def describe(bdev: str = "one", more: str = "") -> None:
        values = {"one": disks[0], "two": disks[1], "folder": tmp_path, "bdev": bdev}
        values |= {"nqn": NQN, "port": PORT, "nguid": NGUID, "host": kernel_host.HOST_NQN}
        description.write_text(DESCRIPTION.format(**values) + more)

    def g35(verb: str, *words: str) -> str:
        assert status_of("enclosure", verb, str(description), "--configfs", *words) == 0
        return capsys.readouterr().out

    describe()
    assert g35("apply").endswith("4 steps\n")
    assert g35("apply") == "nothing to do\n"
    controller = kernel_host.connect(NQN, PORT)
    assert (controller.attribute("serial"), controller.attribute("model")) == ("LAB35", "g35 lab")
    assert controller.identify()["ioccsz"] == (64 + 8192) // 16
    assert controller.identify_namespace(3)["nguid"] == NGUID
    device = controller.wait_for_namespace(3)  # the kernel looks for them when connect is through
    write_directly(device, b"\x35" * 4096)
    assert read_directly(device, 1) == b"\x35" * 4096
    kernel_host.disconnect_all()
    # One thing changed: the namespace lies on the other disk.
    describe("two")
    assert g35("apply").endswith("2 steps\n")
    controller = kernel_host.connect(NQN, PORT)
    assert controller.identify_namespace(3)["nsze"] == 32 * 256
    kernel_host.disconnect_all()

    # And with a key: without the secret nobody comes in any more.
    describe("two", 'key = "host"\n')
    shown = g35("apply", "--dry-run")
    assert "dhchap_key" in shown
    assert "DHHC-1" not in shown
    assert g35("apply").endswith("1 step\n")
    assert g35("apply") == "nothing to do\n"
    with pytest.raises(AssertionError):
        kernel_host.connect(NQN, PORT)
    kernel_host.connect(NQN, PORT, "--dhchap-secret", secret)
    kernel_host.disconnect_all()

    description.write_text('[[transports]]\ntype = "tcp"\n')
    g35("apply", "--prune")
    assert not [each for name in ("subsystems", "ports", "hosts") for each in (NVMET / name).iterdir()]
