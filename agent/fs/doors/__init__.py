"""The two ways to be mounted on this host: /dev/fuse by ourselves, and pyfuse3."""
