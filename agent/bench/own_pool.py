"""A pool that `g35 up` does not make: one enclosure, and an agent with the tables that a bench writes."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.bench.sites import READ_DEADLINE_MS
from agent.cli.up.children import run_child
from agent.errors import G35Error
from agent.fs.doors.mounting import clear_dead_mount
from agent.inline.secrets import create_root_key

ANSWER_SECONDS = 10.0
FORMAT_SECONDS = 120.0
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OwnPool:
    """What lies where, and which processes serve it."""

    folder: Path
    mount: Path
    config: Path
    agent_pid: int
    enclosure_pid: int

    def status(self) -> str:
        """The agent's status, as JSON."""
        return (self.mount / ".g35/status.json").read_text()

    def drives(self) -> list[dict[str, Any]]:
        """The enclosure's own counters of its drives."""
        found: list[dict[str, Any]] = ask_enclosure(self.folder / "jbof.sock", "stats")["drives"]
        return found


@contextmanager
def own_pool(folder: Path, drives: Sequence[str], tables: str, agent_keys: str = "") -> Iterator[OwnPool]:
    """Such a pool in a folder that is made, for as long as the block runs.

    `drives`: options of the enclosure. `tables`: further tables of the agent's configuration, its volumes
    among them. `agent_keys`: further lines of `[agent]`.
    """
    folder.mkdir()
    mount, config = folder / "mnt", folder / "agent.toml"
    ready, up = folder / "jbof.json", folder / "agent.ready"
    enclosure = [
        sys.executable, "-P", "-m", "emulator.jbof", "--name", "jbof", "--address", "127.0.0.1", *drives,
        "--control", str(folder / "jbof.sock"), "--ready-file", str(ready),
    ]  # fmt: skip
    g35 = [sys.executable, "-P", "-m", "agent.cli"]
    with ExitStack() as stack:
        run_child(stack, "the enclosure", enclosure, folder / "jbof", ready.exists, START_SECONDS)
        where = json.loads(ready.read_text())
        config.write_text(
            f'[agent]\nmount = "{mount}"\nstate = "{folder / "state"}"\n'
            f'key_file = "{folder / "root.key"}"\nread_deadline_ms = {READ_DEADLINE_MS}\n{agent_keys}'
            f'[[enclosures]]\nname = "jbof"\naddress = "127.0.0.1"\nport = {where["port"]}\n'
            f'nqn = "{where["nqn"]}"\n{tables}'
        )
        create_root_key(folder / "root.key")
        words = ("--config", str(config))
        done = subprocess.run(
            [*g35, "pool", "format", *words],
            capture_output=True, text=True, timeout=FORMAT_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise G35Error(f"g35 pool format: {done.stderr.strip()}")
        stack.callback(clear_dead_mount, mount)
        agent = [*g35, "agent", *words, "--ready-file", str(up)]
        run_child(stack, "the agent", agent, folder / "agent", up.exists, START_SECONDS)
        pids = [int((folder / f"{name}.pid").read_text()) for name in ("agent", "jbof")]
        yield OwnPool(folder, mount, config, *pids)


def ask_enclosure(control: Path, verb: str, **fields: object) -> dict[str, Any]:
    """The answer of an enclosure at its control socket. Raises G35Error for a refusal.

    To start a program for that would take the processors from what is measured.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_SECONDS)
        asking.connect(str(control))
        asking.sendall(json.dumps({"verb": verb, **fields}).encode() + b"\n")
        with asking.makefile("rb") as lines:
            answer: dict[str, Any] = json.loads(lines.readline())
    if not answer["ok"]:
        raise G35Error(f"the enclosure refuses {verb}: {answer['error']}")
    return answer
