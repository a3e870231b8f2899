"""What `g35 doctor` finds: one record for each thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a finding counts: only `missing` makes the exit code 1."""

    OK = "ok"
    WITHOUT = "without"
    """Something optional is absent; what is lost is said."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `advice` is empty where nothing is to be done."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
