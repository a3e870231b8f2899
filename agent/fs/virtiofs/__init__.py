"""The virtio-fs device: a vhost-user back-end that carries FUSE requests of a guest. Start at door.py."""
