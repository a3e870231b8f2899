"""`pyverbs.dma_util`: barriers and registers of hardware. There is none here."""

raise ImportError("the emulated device has no registers: pyverbs.dma_util does not exist for it")
