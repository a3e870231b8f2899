"""Authenticating a queue after Connect: a procedure over Authentication Send and Receive.

The exchange is `nvmeof/authentication/host_side.py`; the order of commands is that of NVMe Base 2.0,
in-band authentication.
"""

from __future__ import annotations

from contextlib import suppress

from nvmeof.authentication.credentials import Credentials
from nvmeof.authentication.host_side import HostAuthentication
from nvmeof.errors import AuthenticationFailed, CommandFailed, ConnectionLost
from nvmeof.host import commands
from nvmeof.host.procedure import Procedure, done


def authenticate(credentials: Credentials, host_nqn: str, subsystem_nqn: str) -> Procedure[None]:
    """Prove ourselves on this queue, and let the controller do so.

    Raises `AuthenticationFailed`, and `ConnectionLost`, which says so: Linux's target may hang up on a wrong
    secret before its verdict is on the wire, and then nobody can tell that from a link that failed.
    """
    exchange = HostAuthentication(credentials, host_nqn, subsystem_nqn)
    try:
        yield from done(commands.authentication_send(exchange.negotiate()))
        reply = exchange.challenged((yield from _receive()))
        yield from done(commands.authentication_send(reply))
        confirmation = exchange.concluded((yield from _receive()))
        if confirmation is not None:
            yield from done(commands.authentication_send(confirmation))
    except AuthenticationFailed as error:
        if error.farewell is not None:
            # Whatever it is answered with, and if it hangs up meanwhile: we hang up next, and know why.
            with suppress(ConnectionLost):
                yield commands.authentication_send(error.farewell)
        raise
    except CommandFailed as error:
        raise AuthenticationFailed(f"the controller breaks the authentication off: {error}") from error
    except ConnectionLost as error:
        raise ConnectionLost(
            f"{error}, amid the authentication; if it does so every time, compare the secrets of both sides"
        ) from error


def _receive() -> Procedure[memoryview]:
    command = yield from done(commands.authentication_receive())
    assert command.data_in is not None
    return command.data_in
