"""The ways, and what each is made of: its drives, its volume, what lies beside or below them.

All have room for the same number of blocks. They differ in the flash that this takes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.local.label import NAMESPACE_START
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.map.document import (
    DATA_START,
    EXTENT_ALIGNMENT,
    NAMES_BYTES_MAX,
    NAMES_PER_CHUNK,
    set_size,
)

VOLUME: Final = "blocks"
DRIVES: Final = 2
"""Of the enclosure of each way."""
MARKS: Final = 340
SPILL_BYTES: Final = "64G"
SPILL_BUNDLE: Final = "8M"
"""The shortest there is: a pool as small as these evicts a value soon after its set was looked at."""
SPILL_DEADLINE_MS: Final = 2000
"""As the deadline of flash here: a bench measures speed, and a hiccup of the scheduler is no miss."""
AGENT_KEYS: Final = "directory_fresh_ms = 1000\nprocesses = 1\n"
"""As `g35 up` has it: each pool has one agent. One process, so that its processor time is the agent's."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to keep blocks. `sets`, here and below, are those of each of the enclosure's DRIVES."""

    name: str
    what: str
    kind: str = "kv"
    is_kv_native: bool = False
    local_first: bool = False
    spills: bool = False

    @property
    def copies(self) -> int:
        return 2 if self.local_first else 1

    def drive_bytes(self, sets: int, value_bytes: int) -> int:
        if self.is_kv_native:
            # Beside the values there is the superblock, which is less than a slot's room.
            return (sets * SLOTS_PER_SET + 1) * (HEADER_BYTES + value_bytes)
        size = DATA_START + sets * set_size(value_bytes, int(self.spills))
        if self.kind == "shared":
            size += sets * NAMES_PER_CHUNK * set_size(NAMES_BYTES_MAX) + EXTENT_ALIGNMENT
        return size

    def local_bytes(self, sets: int, value_bytes: int) -> int:
        """Of the device of this machine: as much room as the enclosure has, and a label. 0: there is none."""
        if not self.local_first:
            return 0
        return NAMESPACE_START + DATA_START + DRIVES * sets * set_size(value_bytes)

    def flash_bytes(self, sets: int, value_bytes: int) -> int:
        return DRIVES * self.drive_bytes(sets, value_bytes) + self.local_bytes(sets, value_bytes)

    def drive_options(self, sets: int, value_bytes: int) -> list[str]:
        """Of the enclosure."""
        drives = ["--drives", "0", "--kv-drives"] if self.is_kv_native else ["--drives"]
        return [*drives, str(DRIVES), "--drive-size", str(self.drive_bytes(sets, value_bytes)), "--prefault"]

    def tables(self, value_bytes: int, local: str, local_port: int, below: Path) -> str:
        """Of the agent's configuration. `local` is the path of this machine's device, `below` the folder of
        G4, for the ways that have them."""
        volume = {"kind": f'"{self.kind}"', "value_size": value_bytes, "share": 1.0}
        if self.local_first:
            volume |= {"copies": 2, "local_first": "true"}
        if self.spills:
            volume |= {"marks": MARKS}
        lines = ["[prestage]", "memory = 0", "[[volumes]]", f'name = "{VOLUME}"']
        lines += [f"{key} = {value}" for key, value in volume.items()]
        if self.local_first:
            lines += ["[[local]]", f'path = "{local}"', f'export = "127.0.0.1:{local_port}"']
        if self.spills:
            lines += [
                "[[spill]]", f'folder = "{below}"', f'max_bytes = "{SPILL_BYTES}"', 'values = "all"',
                f'bundle = "{SPILL_BUNDLE}"', f"deadline_ms = {SPILL_DEADLINE_MS}",
            ]  # fmt: skip
        return "\n".join(lines) + "\n"


WAYS: Final = (
    Way("files", "files of /shared, one for each block", kind="shared"),
    Way("pooled", "values of /kv, in slots of the pool"),
    Way("KV-native", "values of /kv, on namespaces of the KV command set", is_kv_native=True),
    Way(
        "local first",
        "values of /kv in two copies, the first on a device of this machine",
        local_first=True,
    ),
    Way("with G4", "values of /kv in slots, and in a folder when they are evicted", spills=True),
)
