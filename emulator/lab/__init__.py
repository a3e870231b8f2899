"""The lab: Debian's stock kernel in a virtual machine, so that real drivers can judge ours.

The guest's root file system is this machine's own, read-only, under a layer in the guest's memory. So
the guest has this Python, this virtual environment and this checkout, and cannot damage them.

Read `machine.py` first (what a test calls), then `init.sh` (what happens inside, in order), then
`kernel.py`, `image.py` and `accelerator.py` for where the pieces come from. `gpu_host.py` is the guest that
mounts an agent's virtio-fs device; `device_relay.py` keeps that device alive while the agent is restarted.
`guest_files.py` is how this machine reads what a guest's root has written.
"""
