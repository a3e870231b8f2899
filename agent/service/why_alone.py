"""Why an agent is one process (docs/processes.md), as far as its configuration and this machine say."""

import os

from agent.config.configuration import Configuration
from agent.fs.doors import mounting


def why_alone(configuration: Configuration) -> str:
    """Why an agent of this configuration has no readers, though it asks for some; empty where it has them."""
    has_mount = configuration.agent.mount is not None
    reasons = {
        'agent.door is "pyfuse3"': has_mount and configuration.agent.door != "fuse",
        "there is a [[local]] table": bool(configuration.local),
        "there is a [[discovery]] table": bool(configuration.discovery),
        "there is a [[spill]] table": bool(configuration.spill),
        "prestage.learn is set": configuration.prestage.learn,
        "fabric.local_address is that of an emulated device": bool(configuration.fabric.local_address)
        and configuration.fabric.verbs_provider != "pyverbs",
        "/dev/fuse may not be opened": has_mount and not os.access(mounting.DEV_FUSE, os.R_OK | os.W_OK),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def alone_though_asked(configuration: Configuration) -> str:
    """That an agent is one process, and why, where `processes` asks for several; empty where nobody is told.

    It looks at /dev/fuse as the caller's user."""
    asked = configuration.agent.processes
    why = why_alone(configuration) if asked > 1 else ""
    return why and f"this agent is one process, not {asked}: {why}"
