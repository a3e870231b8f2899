"""The socket of an agent's virtio-fs device, and errors that say why it is unusable and what to do."""

import os
import select
import socket
import stat
import struct
from pathlib import Path

from emulator.lab.errors import LabError

ANSWER_S = 10.0
"""An agent that does not answer for so long counts as gone."""
SILENCE_S = 1.0
"""An agent that hangs up on a silent connection does so well before that."""
_PEER = struct.Struct("=iII")
"""SO_PEERCRED: process, user, group (unix(7))."""

START_ONE = "start one with: g35 up --virtiofs, or with [virtiofs] in the configuration of g35 agent"
NAME_IT = "name the agent's socket with --socket, or the agent's configuration with --config"
ONE_AT_A_TIME = "one guest at a time has a device: end that one, or name another agent's socket with --socket"


class NoDeviceError(LabError):
    """No usable virtio-fs device; the text says why, and what to do."""

    @classmethod
    def at(cls, path: Path, why: str, advice: str) -> "NoDeviceError":
        return cls(f"no virtio-fs device at {path}: {why}\n{advice}")


def require_socket(path: Path) -> None:
    """Raises NoDeviceError where there is no socket at `path`. Does not connect."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        raise NoDeviceError.at(path, "there is no such socket", START_ONE) from None
    except (OSError, ValueError) as error:
        raise NoDeviceError.at(path, why_of(error), NAME_IT) from None
    if not is_socket:
        raise NoDeviceError.at(path, "that is no socket", NAME_IT)


def connected(path: Path) -> socket.socket:
    """A connection to `path` that waits for `ANSWER_S` at most. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def cannot_connect(path: Path, error: OSError) -> NoDeviceError:
    """The meaning of a failure of `connected`."""
    if isinstance(error, ConnectionRefusedError):
        return NoDeviceError.at(
            path, "nobody listens at this socket any more; its agent has ended", START_ONE
        )
    if isinstance(error, PermissionError):
        why = f"{why_of(error)}: only the user that the agent runs as may open it"
        return NoDeviceError.at(path, why, "run g35 host as that user")
    return NoDeviceError.at(
        path, why_of(error), START_ONE if isinstance(error, FileNotFoundError) else NAME_IT
    )


def hung_up(path: Path) -> NoDeviceError:
    """The listener has hung up on our first message. A second, silent connection tells why: an agent whose
    device is taken hangs up on that as well, and a listener with another protocol waits."""
    try:
        with connected(path) as connection:
            process, _user, _group = _PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            ended, _, _ = select.select([connection], [], [], SILENCE_S)
    except OSError as error:
        return cannot_connect(path, error)
    if ended:
        why = f"another guest has the device (process {process} listens there, and hangs up at once)"
        return NoDeviceError.at(path, why, f"{ONE_AT_A_TIME}\nif no guest runs: {NAME_IT}")
    return no_device(path, f"process {process} listens there, and hangs up when asked for one")


def no_device(path: Path, what_it_did: str) -> NoDeviceError:
    """The listener does not speak vhost-user, or has no such device."""
    return NoDeviceError.at(path, f"that is no vhost-user device; {what_it_did}", NAME_IT)


def silent(path: Path) -> NoDeviceError:
    """The listener does not answer our first message."""
    why = f"no answer within {ANSWER_S:.0f} s: it is an agent that hangs, or no vhost-user device"
    return NoDeviceError.at(path, why, f"an agent's state is told by g35 status; otherwise {NAME_IT}")


def why_of(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
