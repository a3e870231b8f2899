"""The section of the configuration for G4: where values go that are evicted (docs/tiers.md)."""

import re
from typing import Final, Literal

from pydantic import Field, model_validator

from agent.config.document_problems import AbsolutePath, Section, want_once
from agent.config.s3_section import BUCKET
from agent.pool.map.names import VolumeName
from agent.sizes import Size

BUNDLE_BYTES_MIN: Final = 8 << 20
BUNDLE_BYTES_MAX: Final = 64 << 20
_ENDPOINT: Final = re.compile(
    r"https?://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?/?", re.IGNORECASE
)


class SpillSection(Section):
    """A place in G4 for values that are evicted, of some volumes or of all (docs/tiers.md). One table for
    each place: a folder, or a bucket. Every agent of a pool should have the same."""

    volumes: tuple[VolumeName, ...] = Field(
        (),
        max_length=64,
        description="The key-value volumes whose values go there; empty: all. A volume has one place.",
    )
    folder: AbsolutePath | None = Field(
        None, description="A folder of a shared file system (Scale, NFS, Lustre) or of a disk; it must exist."
    )
    bucket: str = Field("", description="Or a bucket of an S3 store; it must exist.")
    endpoint: str = Field("", description="Of the bucket: `https://HOST:PORT`, or `http://`.")
    region: str = Field("us-east-1", min_length=1, max_length=64, description="Of the bucket.")
    credentials_file: AbsolutePath | None = Field(
        None,
        description="Of the bucket: an access key in the format of the AWS tools, a file of mode 0600.",
    )
    max_bytes: Size = Field(
        ge=BUNDLE_BYTES_MAX, description="Bytes that this pool's values may take there, for each volume."
    )
    values: Literal["used", "all"] = Field(
        "used",
        description="Which evicted values go there: `used`, those that were read since they were put, or are "
        "pinned; `all`, which writes some ten times as much (docs/tiers.md).",
    )
    bundle: Size = Field(
        32 << 20,
        ge=BUNDLE_BYTES_MIN,
        le=BUNDLE_BYTES_MAX,
        description="Bytes of one object, 8M to 64M; one that does not fill up in time is smaller.",
    )
    rate: Size = Field(
        256 << 20, ge=1 << 20, description="Bytes a second at the most that this agent writes there."
    )
    deadline_ms: float = Field(
        100.0,
        gt=0,
        le=60_000,
        description="How long a get waits for a value from there, beyond its time for flash.",
    )
    memory: Size = Field(
        256 << 20,
        ge=4 * BUNDLE_BYTES_MAX,
        description="Memory for bundles in the making and for values on their way up.",
    )
    in_flight: int = Field(32, ge=1, le=256, description="Reads from there that are under way at once.")

    @property
    def name(self) -> str:
        return f"folder {self.folder}" if self.folder is not None else f"bucket {self.bucket}"

    @model_validator(mode="after")
    def _is_one_place(self) -> "SpillSection":
        if (self.folder is not None) == bool(self.bucket):
            raise ValueError("a place is either a folder or a bucket")
        if self.folder is not None and (self.endpoint or self.credentials_file is not None):
            raise ValueError("endpoint and credentials_file are for a bucket")
        if self.bucket:
            if BUCKET.fullmatch(self.bucket) is None:
                raise ValueError(f"{self.bucket!r} is no name for a bucket")
            found = _ENDPOINT.fullmatch(self.endpoint)
            if found is None or (found[2] is not None and not 0 < int(found[2][1:]) < 1 << 16):
                raise ValueError("a bucket wants an endpoint such as https://s3.example:9000")
            if self.credentials_file is None:
                raise ValueError("a bucket wants a credentials_file")
        want_once(self.volumes, "a volume is named twice")
        return self
