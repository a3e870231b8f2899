"""An enclosure's words for a terminal, which obeys some characters: names and messages are not ours."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text, with control characters and halves of characters as numbers."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)
