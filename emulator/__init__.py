"""What cannot be bought: an enclosure, a lab with a real kernel, a soft-RoCE NIC."""

import nvmeof  # noqa: F401  (it decides whether the hot modules are compiled ones, before any is imported)
