"""Addresses on loopback for the emulated RDMA devices of `g35 up`: each device has one of its own."""

import ipaddress
import socket
from pathlib import Path

from agent.errors import G35Error
from nvmeof.transport.verbs_provider import ROCE_PORT, VerbsUnavailable, free_loopback_address


def free_address_from(file: Path) -> str:
    """The address of the last time where there was one and it is free, else a fresh one, kept in `file`."""
    try:
        address = str(ipaddress.IPv4Address(file.read_text().strip()))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, ROCE_PORT))
            return address
    except (OSError, ValueError):
        pass
    try:
        address = free_loopback_address()
    except VerbsUnavailable as error:
        raise G35Error(str(error), "rdma_rxe holds it where its module is loaded") from error
    file.write_text(f"{address}\n")
    return address
