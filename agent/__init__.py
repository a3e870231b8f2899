"""The DPU program: it pools enclosures, seals and checks blocks, and serves the GPU host's mount."""

import nvmeof  # noqa: F401  (it decides whether the hot modules are compiled ones, before any is imported)
