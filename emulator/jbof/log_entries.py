"""Entries of the discovery log for the listeners of an enclosure."""

from __future__ import annotations

from nvmeof.controller.subsystem import Port
from nvmeof.wire.log_page import AddressFamily, TransportType
from nvmeof.wire.rdma import RdmaAddress


def log_entry(transport: str, address: str, port: int, subsystem_nqn: str | None, port_id: int = 1) -> Port:
    """Where a listener is, for the log; for one subsystem alone where that is given."""
    return Port(
        address,
        str(port),
        transport_type=TransportType.RDMA if transport == "rdma" else TransportType.TCP,
        address_family=AddressFamily.IPV6 if ":" in address else AddressFamily.IPV4,
        port_id=port_id,
        tsas=RdmaAddress().encode() if transport == "rdma" else bytes(256),
        subsystem_nqn=subsystem_nqn,
    )


def same_place(one: Port, other: Port) -> bool:
    """Whether two entries are of one listener."""
    return (one.transport_type, one.address, one.service) == (
        other.transport_type, other.address, other.service,
    )  # fmt: skip
