"""How a controller reaches its namespaces (ANA; NVMe Base 2.0, 8.1): a procedure over its log page."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from nvmeof.errors import MalformedPdu
from nvmeof.host import commands
from nvmeof.host.procedure import Procedure, done
from nvmeof.wire.ana import (
    ANA_GROUPS_ONLY,
    CMIC_ANA,
    MAX_GROUPS,
    AnaState,
    ana_log_bytes,
    decode_ana_log_untrusted,
)
from nvmeof.wire.identify import IdentifyController
from nvmeof.wire.log_page import LogPage

Access: TypeAlias = Mapping[int, AnaState]
"""By ANA group. Empty where the controller does not report."""

NO_ACCESS_REPORT: Access = MappingProxyType({})


def read_access(identify: IdentifyController) -> Procedure[Access]:
    """The states of all groups; reading them arms the event that tells of the next change.

    Raises `MalformedPdu`, `CommandFailed` and `ConnectionLost`.
    """
    if not identify.cmic & CMIC_ANA:
        return NO_ACCESS_REPORT
    if not 1 <= identify.nanagrpid <= MAX_GROUPS:
        raise MalformedPdu(f"a controller with {identify.nanagrpid} ANA groups")
    command = commands.get_log_page(LogPage.ANA, ana_log_bytes(identify.nanagrpid), specific=ANA_GROUPS_ONLY)
    yield from done(command)
    assert command.data_in is not None
    log = decode_ana_log_untrusted(command.data_in)
    return MappingProxyType({each.group: each.state for each in log.groups})
