"""Loading verbs by name, and saying why not."""

from __future__ import annotations

import pytest

from nvmeof.errors import LocalProtocolError
from nvmeof.transport import transport_named
from nvmeof.transport.verbs_provider import Verbs, VerbsUnavailable, why_unavailable


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(VerbsUnavailable, match="no_such_verbs"):
        Verbs("no_such_verbs")
    assert "no_such_verbs" in (why_unavailable("no_such_verbs") or "")
    # A package that is there and has no verbs in it.
    assert "nvmeof" in (why_unavailable("nvmeof") or "")


def test_transports_by_name() -> None:
    for name in ("tcp", "rdma"):
        transport = transport_named(name)
        assert callable(transport.open_controller)
        assert callable(transport.connect_io_queue)
    with pytest.raises(LocalProtocolError):
        transport_named("fc")
