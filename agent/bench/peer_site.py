"""Where other stores' clients and servers are, and how they are started (peers/)."""

from __future__ import annotations

import sys
from pathlib import Path

import agent
import nvmeof
from agent.bench.client_process import LineClient
from agent.bench.redis_site import NotHere

PACKAGE = Path(agent.__file__).resolve().parent
ENVIRONMENTS = PACKAGE.parent / ".cache" / "engines"
ENGINE_OF = {"mooncake": "mooncake", "lm": "lmcache"}
"""Which environment of `make engines` has a store's client."""


def interpreter(peer: str) -> Path:
    """The interpreter that has a store's client. Raises NotHere where there is none."""
    engine = ENGINE_OF[peer]
    python = ENVIRONMENTS / engine / "bin" / "python"
    if not (ENVIRONMENTS / engine / ".g35-engine").exists() or not python.exists():
        raise NotHere(f"its client is not installed: make engines ENGINES={engine}")
    return python


def started(peer: str, folder: Path) -> LineClient:
    """A store's servers and its client, all of whose files lie below `folder`."""
    python = interpreter(peer)
    home = folder / peer
    command = [
        "env", f"PYTHONPATH={linked_packages(home)}",
        sys.executable, "-P", "-m", "agent.bench.peers.servers", peer, str(python), str(home),
    ]  # fmt: skip
    return LineClient(f"{peer}'s client", command, home / "client.log")


def linked_packages(home: Path) -> Path:
    """A folder by which an engine's interpreter finds our packages: it holds links to them and nothing else,
    for beside the packages themselves may lie whatever else is installed with us."""
    path = home / "path"
    path.mkdir(parents=True, exist_ok=True)
    for package in (PACKAGE, Path(nvmeof.__file__).resolve().parent):
        link = path / package.name
        if not link.exists():
            link.symlink_to(package)
    return path
