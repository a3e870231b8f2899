"""DH-HMAC-CHAP judged by the kernel: its host against our enclosure, our host against its target.

The enclosure runs in this process, so that a test gives it other secrets, hashes and groups without a start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.authentication.secret import Credentials, DhchapSecret, new_secret
from nvmeof.errors import AuthenticationFailed, ConnectionLost
from nvmeof.host import commands
from nvmeof.transport.base import HostQueue, VerbsChoice
from nvmeof.transport.controller import Controller
from nvmeof.wire.authentication import GroupId, HashId
from tests.support.lab import kernel_host
from tests.support.lab.host_role import BLOCK, DEADLINE_S, HostRole, perform
from tests.support.lab.host_role import HOST_NQN as OUR_NQN
from tests.support.lab.kernel_host import HOST_NQN, KernelController, kernel_log, run
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.lab_enclosure import read_directly, write_directly
from tests.support.lab.rdma_cable import KERNEL, OURS, Cable, inside
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("disconnected")
NULL, FFDHE2048, FFDHE3072 = GroupId.NULL, GroupId.FFDHE2048, GroupId.FFDHE3072

KINDS = pytest.mark.parametrize(
    ("hash_id", "group", "length", "transform"),
    [
        (HashId.SHA256, NULL, 32, None),
        (HashId.SHA384, FFDHE2048, 48, HashId.SHA384),
        (HashId.SHA512, FFDHE3072, 64, HashId.SHA512),
    ],
    ids=["sha256-null", "sha384-ffdhe2048", "sha512-ffdhe3072"],
)


@pytest.fixture(scope="module")
def enclosure() -> Iterator[Enclosure]:
    with Enclosure(EnclosureSettings(drive_bytes=16 << 20)) as running:
        yield running


def secret_options(host: DhchapSecret, own: DhchapSecret | None = None) -> tuple[str, ...]:
    options = ("--dhchap-secret", host.text())
    return options if own is None else (*options, "--dhchap-ctrl-secret", own.text())


def connect(enclosure: Enclosure, *options: str) -> KernelController:
    return kernel_host.connect(enclosure.subsystem.nqn, enclosure.port, *options, queues=1)


def use(controller: KernelController) -> None:
    """Write and read back, past the cache."""
    device = controller.wait_for_namespace(1)
    content = os.urandom(4 * BLOCK)
    write_directly(device, content)
    assert read_directly(device, 4) == content


# --- the kernel's host and our enclosure ----------------------------------------------------------------


@KINDS
def test_the_kernel_proves_itself_and_so_do_we(
    enclosure: Enclosure, hash_id: HashId, group: GroupId, length: int, transform: HashId | None
) -> None:
    host, own = new_secret(length, transform), new_secret(length, transform)
    enclosure.target.set_credentials(
        enclosure.subsystem, HOST_NQN, Credentials(host, own, (hash_id,), (group,))
    )
    before = enclosure.target.authentications.succeeded
    controller = connect(enclosure, *secret_options(host, own))
    use(controller)
    # One authentication for the admin queue, one for the I/O queue.
    assert enclosure.target.authentications.succeeded == before + 2


@pytest.mark.expects_log("authentication failed")
def test_the_kernel_with_a_wrong_secret_is_refused(enclosure: Enclosure) -> None:
    host, own = new_secret(), new_secret()
    enclosure.target.set_credentials(enclosure.subsystem, HOST_NQN, Credentials(host, own, groups=(NULL,)))
    before = enclosure.target.authentications.failed
    for wrong in (secret_options(new_secret()), secret_options(host, new_secret()), ()):
        with pytest.raises(AssertionError):
            connect(enclosure, *wrong)
    wait_until(lambda: not enclosure.target.unproven, 120, "the unproven queues to go")
    assert enclosure.target.authentications.failed == before + 2
    assert "authentication" in kernel_log()
    use(connect(enclosure, *secret_options(host)))


@pytest.mark.expects_log("authentication failed")
def test_the_kernel_authenticates_anew_on_live_queues(enclosure: Enclosure) -> None:
    first, second = new_secret(), new_secret()
    enclosure.target.set_credentials(enclosure.subsystem, HOST_NQN, Credentials(first, groups=(FFDHE2048,)))
    controller = connect(enclosure, *secret_options(first))
    use(controller)
    before = enclosure.target.authentications.succeeded
    enclosure.target.set_credentials(enclosure.subsystem, HOST_NQN, Credentials(second, groups=(FFDHE2048,)))
    attribute = Path("/sys/class/nvme", controller.name, "dhchap_secret")
    attribute.write_text(second.text())
    # Linux 6.12 does so on the admin queue; newer ones on the I/O queues, too.
    wait_until(lambda: enclosure.target.authentications.succeeded > before, DEADLINE_S, "the new secret")
    use(controller)
    attribute.write_text(first.text())
    wait_until(lambda: not enclosure.target.controllers, DEADLINE_S, "the end of a controller")
    assert "wrong" in enclosure.target.authentications.last_failure


def test_the_kernel_over_rdma(cable: Cable) -> None:
    host, own = new_secret(), new_secret()
    with inside():
        far = Enclosure(EnclosureSettings(drive_bytes=16 << 20, transports=("rdma",), address=OURS))
        far.start()
    try:
        credentials = Credentials(host, own, (HashId.SHA256,), (FFDHE2048,))
        far.target.set_credentials(far.subsystem, HOST_NQN, credentials)
        controller = kernel_host.connect(
            far.subsystem.nqn,
            far.port,
            *secret_options(host, own),
            queues=1,
            address=OURS,
            transport="rdma",
        )
        use(controller)
        assert far.target.authentications.succeeded == 2
        controller.disconnect()
    finally:
        far.close()


# --- our host and the kernel's target -------------------------------------------------------------------


def through(target: KernelTarget, credentials: Credentials | None) -> None:
    def write_and_read(queue: HostQueue) -> None:
        content, into = os.urandom(BLOCK), bytearray(BLOCK)
        perform(queue, commands.write(1, 0, 1, [content]))
        perform(queue, commands.read(1, 0, 1, memoryview(into)))
        assert into == content

    HostRole(credentials=credentials).with_queue(target, write_and_read)


@pytest.fixture
def target() -> Iterator[KernelTarget]:
    with KernelTarget(allow_any_host=False) as running:
        running.add_namespace(1)
        running.allow_host(OUR_NQN)
        yield running


@KINDS
def test_we_prove_ourselves_and_so_does_the_kernel(
    target: KernelTarget, hash_id: HashId, group: GroupId, length: int, transform: HashId | None
) -> None:
    host, own = new_secret(length, transform), new_secret(length, transform)
    target.authenticate(
        OUR_NQN, host.text(), own.text(), hash_name=hash_id.name.lower(), group=group.name.lower()
    )
    through(target, Credentials(host, own))
    through(target, Credentials(host))


def test_we_with_a_wrong_secret_are_refused(target: KernelTarget) -> None:
    host, own = new_secret(), new_secret()
    target.authenticate(OUR_NQN, host.text(), own.text(), hash_name="sha256", group="null")
    for wrong, said in (
        (Credentials(new_secret(), own), "does not accept the secret"),
        (Credentials(host, new_secret()), "could not prove itself"),
        (None, "no secret"),
    ):
        # Linux's target ends the controller as soon as its verdict is queued: on a slow machine the
        # connection closes before the verdict is sent, and there is none to be read.
        with pytest.raises((AuthenticationFailed, ConnectionLost), match=f"{said}|amid the authentication"):
            through(target, wrong)
    through(target, Credentials(host, own))


def test_a_kernel_that_does_not_authenticate_is_refused_where_it_should(target: KernelTarget) -> None:
    with pytest.raises(AuthenticationFailed, match="does not authenticate"):
        through(target, Credentials(new_secret(), new_secret()))
    through(target, Credentials(new_secret()))


def test_we_over_rdma(cable: Cable) -> None:
    host, own = new_secret(), new_secret()
    role = HostRole(verbs=VerbsChoice("pyverbs", KERNEL), credentials=Credentials(host, own))

    async def check(controller: Controller) -> None:
        assert [each.nsid for each in controller.namespaces()] == [1]

    with role.target(allow_any_host=False) as target:
        target.add_namespace(1)
        target.allow_host(OUR_NQN)
        target.authenticate(OUR_NQN, host.text(), own.text(), hash_name="sha256", group="ffdhe2048")
        role.with_controller(target, check)


def test_nvme_cli_knows_our_secrets() -> None:
    """The representation is the one that everybody uses."""
    for length, transform in ((32, None), (48, HashId.SHA384), (64, HashId.SHA512)):
        said = run("nvme", "check-dhchap-key", "--key", new_secret(length, transform).text())
        assert "valid" in said
