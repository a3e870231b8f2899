"""The section of the configuration for the query door (docs/query.md)."""

from pydantic import Field, model_validator

from agent.config.document_problems import AbsolutePath, Section, want_once
from agent.config.http_section import HttpSection
from agent.pool.map.names import TenantName


class QueryTenantSection(Section):
    """A tenant whose router may ask; one table for each. It hears of its own volumes alone."""

    tenant: TenantName = Field(description="Whose volumes are asked about.")
    tokens: AbsolutePath = Field(description="Its tokens: a file of mode 0600, made by `g35 key make-query`.")


class QuerySection(HttpSection):
    """An HTTP listener that says how much of a prompt this pool can serve (docs/query.md). Off unless
    `listen` is given."""

    workers: int = Field(
        1, ge=1, le=16, description="Threads of the door; each has a queue of its own on every enclosure."
    )
    requests: int = Field(
        16,
        ge=1,
        le=256,
        description="Requests under way at once; one for each tenant at least. Half are reserved for "
        "tenants in equal shares. A tenant with too many is told to slow down.",
    )
    keys_per_s: int = Field(
        1_000_000,
        ge=1_000,
        le=1_000_000_000,
        description="Keys a second that a tenant may ask for, and as many at once. Beyond that it is told "
        "when to ask again.",
    )
    deadline_ms: int = Field(
        50,
        ge=1,
        le=10_000,
        description="How long an answer waits for directories that are not remembered. Later ones count as "
        "`late`.",
    )
    tenants: tuple[QueryTenantSection, ...] = Field((), max_length=64, description="See `[[query.tenants]]`.")

    @model_validator(mode="after")
    def _has_tenants(self) -> "QuerySection":
        if self.listen and not self.tenants:
            raise ValueError("the query door has no tenants: nobody could come in")
        want_once((each.tenant for each in self.tenants), "a tenant is named twice")
        return self
