"""The section of the configuration for the pool as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent.sizes import Size


class PoolSection(BaseModel):
    """Choices that concern the pool as a whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    membership: Literal["manual", "auto"] = Field(
        "manual",
        description="Who lets blank namespaces into the pool: `manual`, `g35 pool add`; `auto`, this agent "
        "while it serves, which also settles the pool where `rebalance` is set.",
    )
    join_after_s: float = Field(
        30.0,
        ge=0.5,
        le=86_400,
        description="With `auto`: how long no other namespace must have come or gone before those that are "
        "new join, all at once.",
    )
    rebalance: Size = Field(
        0,
        ge=0,
        description="Bytes a second at the most that this agent moves to namespaces that joined the pool; "
        "0: it moves nothing. Where a pool holds files, set it on the agent that serves them.",
    )
    allow_plain: bool = Field(
        False, description="The second word for `plain+crc64`: without it that suite is refused."
    )
