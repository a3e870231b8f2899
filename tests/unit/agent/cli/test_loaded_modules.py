"""What a verb loads before it does anything: each start pays for a library that it does not need."""

import subprocess
import sys
from pathlib import Path

import pytest

TELL = "import sys, {module}\nprint([name for name in {names!r} if name in sys.modules])"
HTTP = ("h11", "agent.http.door", "agent.http.connection")
S3 = ("agent.s3.door", "agent.s3.make_door", "agent.s3.rdma.engine", "agent.spill.s3_target")
XML = ("xml.etree.ElementTree",)
GUESTS = ("agent.fs.virtiofs.door", "agent.virtio.vhost_user")
QUERIES = ("agent.query.door", "agent.query.service")
INSTRUMENTS = ("agent.bench", "agent.replay", "agent.sim", "agent.claims", "hypothesis", "emulator")
METRICS = ("prometheus_client", "agent.telemetry.metrics")
OTHER_DOORS = ("pyfuse3", *HTTP, *S3, *XML, *GUESTS, *QUERIES, *METRICS)
AGENT = ("agent.service.agent", "agent.fs.kv_face", "agent.pool.access")
NOT_OF_ENCLOSURES = ("numpy", "trio", "cryptography", "rich", "awscrt", "h11")
LIBRARIES = ("numpy", "trio", "cryptography", "sqlite3", "awscrt")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("agent.cli.agent_verb", ("rich", "awscrt", *OTHER_DOORS, *INSTRUMENTS)),
        ("agent.cli.pool_verb", ("awscrt", *AGENT, *OTHER_DOORS, *INSTRUMENTS)),
        ("agent.cli.tenant_verb", ("awscrt", *AGENT, *OTHER_DOORS, *INSTRUMENTS)),
        ("agent.cli.up.up_verb", ("rich", "awscrt", *AGENT, *OTHER_DOORS, *INSTRUMENTS)),
        ("agent.cli.mount_verb", ("rich", *AGENT, *OTHER_DOORS, *INSTRUMENTS)),
        ("agent.cli.status_verb", (*LIBRARIES, *AGENT, *OTHER_DOORS, *INSTRUMENTS)),
        ("agent.cli.replay_verb", (*LIBRARIES, *AGENT, *OTHER_DOORS, "agent.bench", "agent.sim", "emulator")),
        (
            "emulator.jbof.cli",
            (*NOT_OF_ENCLOSURES, "emulator.jbof.rpc.server", "agent", "emulator.roce"),
        ),
    ],
)
def test_a_verb_loads_only_what_it_needs(module: str, absent: tuple[str, ...], repository: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-P", "-c", TELL.format(module=module, names=absent)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=repository,
    )
    assert told.stdout.strip() == "[]"
