"""The sections of the configuration that say how this agent serves: prestaging, policies of volumes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.pool.map.names import VolumeName
from agent.pool.prestage.readahead import DEPTH
from agent.sizes import Size


class PrestageSection(BaseModel):
    """What waits in the agent's memory before it is asked for (docs/prestaging.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory: Size = Field(
        256 << 20, ge=0, description="Memory for values that were prestaged; 0 turns prestaging off."
    )
    waits: Literal["sealed", "open"] = Field(
        "sealed",
        description="How announced values wait: `sealed`, as on flash, or `open`, in clear, which saves the "
        "cipher when they are asked for and leaves them readable in the agent's memory for up to 65 s.",
    )
    learn: bool = Field(
        False,
        description="Read the likely continuation of a prefix that is being read, learned from what followed "
        "it before. It has half of `memory` at the most.",
    )
    depth: int = Field(DEPTH, ge=1, le=64, description="Values that are read ahead of the one being read.")
    learn_rate: Size = Field(
        1 << 30, ge=0, description="Bytes a second at the most that are read for guesses; 0: without bound."
    )


class PolicySection(BaseModel):
    """How this agent serves one key-value volume, where that is not as by default (docs/prestaging.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    volume: VolumeName = Field(description="The volume; one table for each.")
    write: Literal["through", "back", "second-use"] = Field(
        "through",
        description="When a put is acknowledged. `through`: when it is on flash; `back`: when it is in this "
        "agent's memory, and an agent that dies loses what it has yet to store; `second-use`: as `through`, "
        "but where a live value would have to go, a key that was not put before is taken and forgotten.",
    )
    write_back_memory: Size = Field(
        64 << 20, ge=1 << 20, description="Memory for values that `back` has yet to store; others go through."
    )
    prefill_tokens_per_s: float = Field(
        0.0,
        ge=0,
        description="How many tokens a second the engine computes. With `bytes_per_token` a get that would "
        "take longer than computing its value is a miss (`late`) at once; 0: none is refused for that.",
    )
    bytes_per_token: Size = Field(0, ge=0, description="What a token weighs in a value of this volume.")

    @model_validator(mode="after")
    def _gate_is_whole(self) -> PolicySection:
        if (self.prefill_tokens_per_s > 0) != (self.bytes_per_token > 0):
            raise ValueError("prefill_tokens_per_s and bytes_per_token go together")
        return self
