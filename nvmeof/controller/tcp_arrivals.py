"""Data of a host that are on their way to an NVMe/TCP controller queue (`tcp_queue.py`)."""

from __future__ import annotations

from typing import Final

from nvmeof.controller.request import Request


class Transfer:
    """Data that an R2T has asked for. `placed` bytes have been given a place, `accepted` have arrived."""

    __slots__ = ("accepted", "placed", "request", "tag")

    def __init__(self, request: Request, tag: int) -> None:
        self.request = request
        self.tag = tag
        self.placed = 0
        self.accepted = 0


class Arrival:
    """Data under way into their place, `offset` bytes into their command; the PDU's event follows."""

    __slots__ = ("offset", "request", "transfer", "view")

    def __init__(
        self, request: Request, offset: int, view: memoryview, transfer: Transfer | None = None
    ) -> None:
        self.request: Final = request
        self.offset: Final = offset
        self.view: Final = view
        self.transfer: Final = transfer
