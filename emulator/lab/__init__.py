"""The lab: Debian's stock kernel in a virtual machine, so that real drivers can judge ours.

The guest's root file system is this machine's own, read-only, under a layer in the guest's memory. So
the guest has this Python, this virtual environment and this checkout, and cannot damage them.

Read `machine.py` first (the interface of tests), then `init.sh` (the guest's boot), then `kernel.py`,
`image.py` and `accelerator.py`. `gpu_host.py` is a guest that mounts an agent's virtio-fs device;
`device_relay.py` keeps that device alive while the agent is restarted. `guest_files.py` reads files that a
guest's root has written.
"""
