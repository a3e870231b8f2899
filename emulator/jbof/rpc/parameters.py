"""The parameters of RPC methods. Types are strict, as SPDK's: "1" is no number.

Members of SPDK without a use here are allowed with their neutral value alone: a request is done or refused,
never ignored in part.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Text = Annotated[str, Field(max_length=4096)]
_Number = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


class Parameters(BaseModel):
    """Of any method; unknown members are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NoParameters(Parameters):
    """Of a method that takes none."""


class Named(Parameters):
    """`name` alone."""

    name: _Text


class GetBdevs(Parameters):
    name: _Text | None = None
    timeout: _Number | None = None


class _CreateInMemory(Parameters):
    block_size: _Number
    num_blocks: _Number
    uuid: _Text | None = None
    physical_block_size: Literal[0, 512, 4096] = 0
    md_size: Literal[0] = 0
    dif_type: Literal[0] = 0
    dif_is_head_of_md: Literal[False] = False


class CreateMalloc(_CreateInMemory):
    name: _Text | None = None
    optimal_io_boundary: Literal[0] = 0
    md_interleave: Literal[False] = False
    dif_pi_format: Literal[0] = 0
    numa_id: Literal[-1] = -1


class CreateNull(_CreateInMemory):
    name: _Text


class CreateAio(Parameters):
    name: _Text
    filename: _Text
    block_size: _Number = 0
    readonly: Literal[False] = False
    fallocate: bool = False
    uuid: _Text | None = None
    nowait: bool = False


class GetIostat(Parameters):
    names: Annotated[list[_Text], Field(max_length=4096)] | None = None
    per_channel: Literal[False] = False
    reset_mode: Literal["none"] = "none"


class AddKey(Parameters):
    name: Annotated[_Text, Field(min_length=1)]
    path: _Text


class CreateTransport(BaseModel):
    """Decoded "relaxed", as SPDK's log calls it: unknown members are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    trtype: _Text
    max_queue_depth: _Number | None = None
    max_io_qpairs_per_ctrlr: _Number | None = None
    in_capsule_data_size: _Number | None = None
    max_io_size: _Number | None = None


class GetTransports(Parameters):
    tgt_name: _Text | None = None
    trtype: _Text | None = None


class CreateSubsystem(Parameters):
    nqn: _Text
    tgt_name: _Text | None = None
    serial_number: Annotated[str, Field(max_length=20)] = "00000000000000000000"
    model_number: Annotated[str, Field(max_length=40)] = "g35 enclosure"
    max_namespaces: Annotated[int, Field(ge=0, le=0xFFFF_FFFE)] = 32
    allow_any_host: bool = False
    ana_reporting: bool = False
    passthrough: Literal[False] = False
    enable_nssr: Literal[False] = False


class OfSubsystem(Parameters):
    """`nqn` alone."""

    nqn: _Text
    tgt_name: _Text | None = None


class GetSubsystems(Parameters):
    nqn: _Text | None = None
    tgt_name: _Text | None = None


class NewNamespace(Parameters):
    bdev_name: _Text
    nsid: _Number = 0
    nguid: _Text | None = None
    uuid: _Text | None = None
    anagrpid: _Number | None = None
    no_auto_visible: Literal[False] = False


class AddNamespace(OfSubsystem):
    namespace: NewNamespace


class RemoveNamespace(OfSubsystem):
    nsid: _Number


class ListenAddress(Parameters):
    trtype: _Text
    adrfam: _Text = "IPv4"
    traddr: _Text
    trsvcid: _Text = "4420"


class AddListener(OfSubsystem):
    listen_address: ListenAddress
    secure_channel: Literal[False] = False
    ana_state: Literal["optimized"] = "optimized"
    sock_impl: _Text | None = None


class RemoveListener(OfSubsystem):
    listen_address: ListenAddress


class OfHost(OfSubsystem):
    host: _Text
    dhchap_key: _Text | None = None
    dhchap_ctrlr_key: _Text | None = None


class RemoveHost(OfSubsystem):
    host: _Text
    timeout_ms: _Number | None = None


class AllowAnyHost(OfSubsystem):
    allow_any_host: bool
