"""The section of the configuration for Tier 0: this server's own SSDs in the pool (docs/tier0.md)."""

import ipaddress
from typing import Annotated

from pydantic import Field, model_validator

from agent.config.document_problems import AbsolutePath, Section, name_of_letters
from agent.config.http_section import parse_listener
from agent.sizes import Size


class LocalSection(Section):
    """A device of this server as a namespace of the pool (docs/tier0.md). The agent beside it reads and
    writes it in place, and serves it to the other agents by NVMe-oF over TCP."""

    path: AbsolutePath = Field(
        description="A block device, or a file. It begins with zeros, or was a local namespace before."
    )
    size: Size = Field(
        0,
        ge=0,
        description="How much of it is used; it cannot be changed later. 0: all. With a size, `g35 pool "
        "format` and `g35 pool add` make a file that is missing.",
    )
    export: str = Field(
        "127.0.0.1:4421",
        description="`ADDRESS:PORT` at which it is served to the other agents (IPv6: `[ADDRESS]:PORT`). "
        "Beyond loopback it wants `hosts_file`.",
    )
    hosts_file: AbsolutePath | None = Field(
        None,
        description="The hosts that may connect there, each with its DH-HMAC-CHAP secret: lines of "
        "`HOST_NQN SECRET [CONTROLLER_SECRET]`, a file of mode 0600.",
    )
    name: Annotated[str, name_of_letters(64)] | None = Field(
        None, description="Your name for it; default: `local:` and the file name of `path`."
    )

    @property
    def shown_name(self) -> str:
        return self.name or f"local:{self.path.name}"

    @property
    def address(self) -> tuple[str, int]:
        return parse_listener(self.export)

    @model_validator(mode="after")
    def _is_served_safely(self) -> "LocalSection":
        address, port = self.address
        if not port:
            raise ValueError(f"export {self.export!r}: other agents look for it at a port that stays, from 1")
        if not ipaddress.ip_address(address).is_loopback and self.hosts_file is None:
            raise ValueError(
                f"export {self.export} is no loopback address, and without a hosts_file every host there "
                "could overwrite the namespace"
            )
        return self
