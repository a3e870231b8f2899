"""`pyverbs.dma_util`: barriers and registers of hardware. There is none here."""

from __future__ import annotations

raise ImportError("the emulated device has no registers: pyverbs.dma_util does not exist for it")
