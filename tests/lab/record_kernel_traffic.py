"""Record the captures in tests/vectors/kernel_tcp: the kernel's NVMe/TCP host with the kernel's target.

Run it in the lab, where both are:

    g35 lab run --results tests/vectors/kernel_tcp -- .venv/bin/python -m tests.lab.record_kernel_traffic

`tests.support.lab.packet_capture.read_connections` reads the byte streams out of them.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.lab import kernel_host
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.packet_capture import Capture

RESULTS = Path("/run/g35/results")


def main() -> None:
    with KernelTarget() as target:
        target.add_namespace(1, mebibytes=2)
        with Capture(RESULTS / "discover.pcap.gz", target.port):
            kernel_host.discover(target.port)
        for digests, name in ((False, "hot_add.pcap.gz"), (True, "identify_digests.pcap.gz")):
            with Capture(RESULTS / name, target.port):
                controller = kernel_host.connect(target.nqn, target.port, digests=digests, queues=1)
                controller.wait_for_namespace(1)
                if digests:
                    controller.identify_namespace(1)
                else:
                    target.add_namespace(2, mebibytes=2)
                    controller.wait_for_namespace(2)
                    target.remove_namespace(2)
                    controller.wait_for_no_namespace(2)
                controller.disconnect()


if __name__ == "__main__":
    main()
