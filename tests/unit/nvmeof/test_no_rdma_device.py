"""Without an RDMA device nothing of librdmacm is called: it would write lines of its own to the log."""

from __future__ import annotations

import logging

import pytest

from nvmeof.transport import verbs_provider
from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.rdma_connect import RdmaLink
from nvmeof.transport.verbs_provider import Verbs, VerbsUnavailable


def provider(*, emulated: bool) -> Verbs:
    verbs = object.__new__(Verbs)
    verbs.name, verbs._registry, verbs._modules = "pyverbs", object() if emulated else None, {}
    return verbs


def test_a_link_is_refused_before_its_event_channel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "it imports, but there is no RDMA device"
    monkeypatch.setattr(verbs_provider, "why_unavailable", lambda _name: why)
    with pytest.raises(VerbsUnavailable, match=f"pyverbs: {why}; g35 doctor says"):
        RdmaLink(VerbsChoice("pyverbs", ""), provider(emulated=False))


def test_an_emulated_device_is_made_when_it_is_wanted() -> None:
    provider(emulated=True).require_device()


def test_a_provider_that_sets_the_log_up_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyverbs 44 calls logging.basicConfig: lines of ours had its form."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def import_module(name: str) -> None:
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.CRITICAL)
        if name.endswith(".wr"):
            raise ImportError("no rdma-core")

    monkeypatch.setattr(verbs_provider.importlib, "import_module", import_module)
    with pytest.raises(VerbsUnavailable, match="ImportError: no rdma-core"):
        Verbs("a.provider")
    assert (root.handlers, root.level) == (before, level)
