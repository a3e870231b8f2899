"""The DPU program: it pools enclosures, seals and checks blocks, and serves the GPU host's mount."""
