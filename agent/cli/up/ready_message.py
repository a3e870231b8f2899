"""What `g35 up` says once the mount is there: where everything is, what to try, and how to end it."""

import os
import shutil
import sys
from pathlib import Path
from shlex import quote

from agent.cli.up.agent_toml import S3_BUCKET
from agent.cli.up.layout import Layout, default_state
from agent.cli.up.up_arguments import UpOptions

TYPED_COMMAND = "G35_UP_COMMAND"
"""In the environment of a detached `g35 up`: how its user has to type it."""
_SAMPLE = Path(__file__).parents[2] / "replay" / "sample_trace.jsonl"


def ready_message(layout: Layout, mount: Path, options: UpOptions, s3_was: str = "") -> str:
    """Lines for people; the last one is `ready` by itself, which programs wait for.

    `s3_was`: the port of S3 the last time, which clients may have in their settings.
    """
    lines = [f"mounted at {mount}; keys, logs and drives are in {layout.state}"]
    if (shared := mount / "shared/shared").is_dir():
        lines.append(f"a folder for engines that store files, the same on every host: {shared}")
    g35 = typed_command()
    if options.virtiofs:
        socket = quote(str(layout.virtiofs_socket))
        lines.append(f"a GPU host that mounts it: {g35} host --socket {socket}")
    if options.s3:
        port = layout.s3_port.read_text().strip()
        if s3_was not in ("", port):
            lines.append(f"S3: port {s3_was} is another program's now: tell clients of {port}")
        url = f"http://127.0.0.1:{port}"
        rdma = f", RDMA at {layout.s3_address.read_text().strip()}" if options.s3_rdma else ""
        lines.append(f"S3: {url}, bucket {S3_BUCKET}, access key in {layout.s3_credentials}{rdma}")
    if options.query:
        url = f"http://127.0.0.1:{layout.query_port.read_text().strip()}/query"
        lines.append(f"routers: {url}, token in {layout.query_tokens}")
    if options.spill is not None:
        toml = quote(str(layout.configuration))
        lines.append(
            f"G4: folder {options.spill.absolute()}; look at it with: {g35} spill status --config {toml}"
        )
    own = "" if layout.state == default_state().absolute() else f" --state {quote(str(layout.state))}"
    lines += [
        "go on with:",
        f"  cp FILE {quote(str(mount / 'kv/kv/NAME'))}",
        f"  {g35} status{own}",
        f"  {g35} replay {quote(str(_SAMPLE))} --mount {quote(str(mount))} --requests 100",
        f"end it with:\n  {g35} down{own}",
        "ready",
    ]
    return "\n".join(lines)


def typed_command() -> str:
    """The command as this user has to type it: by its path where the shell does not find it."""
    if told := os.environ.get(TYPED_COMMAND):
        return told
    typed = Path(sys.argv[0])
    if typed.name != "g35":
        return "g35"
    found = shutil.which("g35")
    return "g35" if found and Path(found).samefile(typed) else quote(str(typed))
