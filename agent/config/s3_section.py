"""The section of the configuration for the S3 door (docs/engines/s3.md)."""

import ipaddress
import re
from typing import Final

from pydantic import Field, field_validator, model_validator

from agent.config.document_problems import AbsolutePath, Section, want_once
from agent.config.http_section import HttpSection
from agent.pool.map.names import TenantName
from agent.sizes import Size

_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
BUCKET: Final = re.compile(rf"(?=.{{3,63}}\Z)(?!\d+(?:\.\d+){{3}}\Z){_LABEL}(?:\.{_LABEL})*")
"""A bucket's name: labels as in a host's name, and no IPv4 address ("Bucket naming rules", Amazon's S3 user
guide)."""
_HOST = re.compile(r"[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\]")


class S3TenantSection(Section):
    """A tenant that comes in by the S3 door; one table for each. It has buckets of its own, which no other
    tenant's access keys see, in its own volumes of kind `files`."""

    tenant: TenantName = Field(description="Whose volumes hold the objects.")
    credentials: AbsolutePath = Field(
        description="Its access keys: a file of mode 0600, made by `g35 key make-s3`."
    )
    buckets: tuple[str, ...] = Field(
        (), max_length=100, description="Buckets to make where they are missing."
    )

    @field_validator("buckets")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if BUCKET.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name for a bucket")
        return names


class S3Section(HttpSection):
    """An HTTP listener for S3-shaped clients (docs/engines/s3.md). Off unless `listen` is given."""

    domain: str = Field(
        "",
        description="With `s3.example`, host `kv1.s3.example` is bucket `kv1`; at other hosts the path has "
        "it.",
    )
    hosts: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="Hosts that stand for a bucket, each `HOST=BUCKET` without a port, for clients that want "
        "the bucket in the host.",
    )
    region: str = Field(
        "us-east-1",
        description="Its region. A signature for another one is refused, and the answer names this one.",
    )
    workers: int = Field(
        2,
        ge=1,
        le=16,
        description="Threads of the door in each process of the agent; each has a queue of its own on every "
        "enclosure.",
    )
    transfers: int = Field(
        32,
        ge=1,
        le=256,
        description="Bodies that move at once, with 2 MiB of memory for each; one for each tenant at least. "
        "Each further process of `agent.processes` moves `transfers` divided by their number besides. Half "
        "are reserved for tenants in equal shares. A request that waits for 20 s is told to slow down.",
    )
    staging: Size = Field(
        64 << 20, ge=16 << 20, description="Memory, of each tenant, for objects that are being written."
    )
    object_max: Size = Field(
        5 << 30,
        ge=1 << 20,
        description="The largest body of one PUT or part; in parts an object may be larger.",
    )
    names_max: Size = Field(
        2 << 30,
        ge=1 << 20,
        description="Room on the state folder's disk for the index of a tenant: names, metadata, parts, "
        "which no quota counts. Beyond it nothing new is stored.",
    )
    upload_hours: float = Field(
        24.0,
        gt=0,
        le=8760,
        description="A multipart upload that is not completed within so many hours is removed.",
    )
    rdma: str = Field(
        "",
        description="Address of the RDMA device that moves objects for clients that ask for it, by "
        "`fabric.verbs_provider`. `transfers` MiB of memory are registered with it. Empty: plain HTTP alone.",
    )
    rdma_connections: int = Field(
        64,
        ge=1,
        le=1024,
        description="RDMA connections of clients at once. Half are reserved for tenants in equal shares. A "
        "connection that nobody uses for 5 minutes ends.",
    )
    rdma_clients: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="Networks, such as `10.1.0.0/16`, where clients may have their RDMA devices, beside the "
        "address that a request comes from. The address of `rdma` and those of enclosures are left out. Name "
        "networks that have clients alone.",
    )
    tenants: tuple[S3TenantSection, ...] = Field((), max_length=64, description="See `[[s3.tenants]]`.")

    @field_validator("rdma")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        return str(ipaddress.ip_address(address)) if address else address

    @field_validator("rdma_clients")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for text in networks:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"{text!r} is no network: {error}") from None
        return networks

    @property
    def bucket_of_host(self) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.hosts)

    @model_validator(mode="after")
    def _holds_together(self) -> "S3Section":
        if self.listen and not self.tenants:
            raise ValueError("the S3 door has no tenants: nobody could come in")
        want_once((each.tenant for each in self.tenants), "a tenant is named twice")
        for each in self.hosts:
            host, equals, bucket = each.partition("=")
            if not equals or _HOST.fullmatch(host) is None or BUCKET.fullmatch(bucket) is None:
                raise ValueError(f"{each!r} is no HOST=BUCKET (without a port; IPv6 in brackets)")
        if self.domain and _HOST.fullmatch(self.domain) is None:
            raise ValueError(f"{self.domain!r} is no domain")
        return self
