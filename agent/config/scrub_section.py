"""The section of the configuration that says whether stored values are read through, and how fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from agent.sizes import Size


class ScrubSection(BaseModel):
    """Reading all that is stored, to find what is bad before somebody asks for it (docs/operating.md).

    Every agent with this section reads all of the pool, so set it on one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bandwidth: Size = Field(
        0,
        ge=0,
        description="Bytes a second at the most, and an eighth of it while the agent's workers read or "
        "write; 0: no scrub.",
    )
    every_hours: float = Field(
        24.0,
        gt=0,
        le=24 * 365,
        description="The next pass begins so long after the end of one; the first with the agent.",
    )
