"""What the sections of all doors that speak HTTP have in common."""

import ipaddress

from pydantic import Field, model_validator

from agent.config.document_problems import AbsolutePath, Section, parse_address


def parse_listener(text: str) -> tuple[str, int]:
    """As `parse_address`, of an address in digits. Port 0 takes a free one."""
    address, port = parse_address(text)
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise ValueError(f"{text!r}: it listens at an IP address, and {address!r} is none") from None
    return address, port


class HttpSection(Section):
    """Where a door listens, and how it proves itself."""

    listen: tuple[str, ...] = Field(
        (),
        max_length=8,
        description="Where it listens, each `ADDRESS:PORT` (IPv6: `[ADDRESS]:PORT`). Beyond loopback it "
        "wants `certificate`. Empty: off.",
    )
    certificate: AbsolutePath | None = Field(
        None, description="TLS: the certificate with its chain, PEM. With it the door speaks TLS alone."
    )
    private_key: AbsolutePath | None = Field(None, description="Its private key, PEM, a file of mode 0600.")
    connections: int = Field(
        256,
        ge=1,
        le=4096,
        description="Connections at once. Until its client shows a key or token, a connection counts for "
        "its address, which may have as many as it leaves to others; for more the oldest of these is "
        "closed. Then it counts for its tenant: half of all are reserved for tenants in equal shares, and a "
        "tenant with too many is told to slow down.",
    )
    idle_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="A connection that moves nothing for this long is closed, before its first request after "
        "10 s at the most.",
    )

    @model_validator(mode="after")
    def _is_safe(self) -> "HttpSection":
        beyond = [
            text for text in self.listen if not ipaddress.ip_address(parse_listener(text)[0]).is_loopback
        ]
        if beyond and self.certificate is None:
            raise ValueError(
                f"{beyond[0]} is no loopback address, and without a certificate bytes go in clear"
            )
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key go together")
        return self
