"""Ports that `g35 up` gives its enclosures: those of the last time, and no port twice."""

from __future__ import annotations

from pathlib import Path

from agent.cli.up.up_verb import _free_port_from


def test_a_port_that_another_enclosure_of_this_start_has_is_not_given_again(tmp_path: Path) -> None:
    """As after a start over RDMA, where all have one port at addresses of their own."""
    file = tmp_path / "jbof-1.port"
    first = _free_port_from(file, 2)
    file.write_text(f"{first}\n")
    assert _free_port_from(file, 2) == first
    other = _free_port_from(file, 2, {first, first + 1})
    assert {first, first + 1}.isdisjoint({other, other + 1})
    beside = _free_port_from(file, 2, {first + 1})
    assert {first + 1}.isdisjoint({beside, beside + 1})
