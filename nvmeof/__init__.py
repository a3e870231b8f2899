"""NVMe over Fabrics as bytes and rules, in both roles; sockets appear only in nvmeof.transport."""

from nvmeof import compiled as _compiled

_compiled.use()
