"""Runs in G4 are asked for in both formats of marks."""

from tests.unit.spill.conftest import mark_blocks

__all__ = ["mark_blocks"]
