"""Which kernel modules the guest gets, and the order in which they can be inserted."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

# In order. Dependencies of a module come before it without being named here, with one exception: an
# algorithm that another module asks the crypto layer for by name is no dependency that depmod can see
# (rxe's CRC-32 is one). A module that this kernel has built in is passed over.
WANTED = (
    "virtio_pci",
    "crc32_generic",
    "crc32c_generic",
    "9pnet_virtio",
    "9p",
    "overlay",
    "ext4",
    "configfs",
    "nvme_fabrics",
    "nvme_tcp",
    "nvmet",
    "nvmet_tcp",
    "veth",
    "sch_netem",
    "rdma_rxe",
    "rdma_ucm",
    "nvme_rdma",
    "nvmet_rdma",
    "null_blk",
    "brd",
    "loop",
    "fuse",
    "virtiofs",
)

LATER = ("nfsd", "nfsv4")
"""Left in the guest's /run/modules for the test that wants them: to insert them takes a fifth of a boot."""


def insertion_order(module_folder: Path, wanted: Iterable[str]) -> list[Path]:
    """Files (as depmod lists them, relative to `module_folder`) in the order of insertion.

    `module_folder` is lib/modules/RELEASE with modules.dep (made by depmod) and modules.builtin.
    Raises KeyError for a module that this kernel has neither as a file nor built in.
    """
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in (module_folder / "modules.dep").read_text().splitlines():
        file, _, dependencies = line.partition(":")
        needs[module_name(file)] = (file, [module_name(each) for each in dependencies.split()])
    built_in = {module_name(line) for line in (module_folder / "modules.builtin").read_text().split()}

    order: list[Path] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen or (name in built_in and name not in needs):
            return
        seen.add(name)
        file, dependencies = needs[name]
        for dependency in dependencies:
            visit(dependency)
        order.append(Path(file))

    for name in wanted:
        visit(name)
    return order


def module_name(file: str) -> str:
    """`kernel/drivers/nvme/host/nvme-tcp.ko.xz` -> `nvme_tcp`: the kernel takes - and _ as one."""
    return PurePosixPath(file).name.split(".ko")[0].replace("-", "_")
