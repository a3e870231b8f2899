"""The two documents that clients send, read without anything XML can do beyond elements and text.

A document type declaration is refused at its first byte, so there are no entities, and none to expand; depth,
elements and text have bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from xml.parsers import expat

from agent.s3.errors import S3Error

DOCUMENT_BYTES_MAX: Final = 4 << 20
DEPTH_MAX: Final = 4
TEXT_MAX: Final = 4096
ROWS_MAX: Final = 10_000


def read_rows(document: bytes, root: str, row: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The `row` elements below `root`, each as its leaves; and the leaves of the root itself.

    Raises S3Error.
    """
    reader = _Reader(root, row)
    parser = expat.ParserCreate("UTF-8", " ")  # whatever the document says of itself
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.EntityDeclHandler = reader.refuse
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.buffer_text = True
    if len(document) > DOCUMENT_BYTES_MAX:
        raise _malformed()
    try:
        parser.Parse(document, True)
    except expat.ExpatError:
        raise _malformed() from None
    return reader.rows, reader.leaves


class _Reader:
    def __init__(self, root: str, row: str) -> None:
        self._root = root
        self._row = row
        self._path: list[str] = []
        self._text = ""
        self.rows: list[dict[str, str]] = []
        self.leaves: dict[str, str] = {}

    def refuse(self, *_: object) -> None:
        raise _malformed()

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        self._path.append(name.rpartition(" ")[2])
        self._text = ""
        if len(self._path) > DEPTH_MAX or self._path[0] != self._root:
            raise _malformed()
        if self._path[1:] == [self._row]:
            if len(self.rows) == ROWS_MAX:
                raise _malformed()
            self.rows.append({})

    def text(self, data: str) -> None:
        self._text += data
        if len(self._text) > TEXT_MAX:
            raise _malformed()

    def end(self, name: str) -> None:
        if len(self._path) == 3 and self._path[1] == self._row:
            self.rows[-1][self._path[2]] = self._text
        elif len(self._path) == 2 and self._path[1] != self._row:
            self.leaves[self._path[1]] = self._text
        self._path.pop()
        self._text = ""


def _malformed() -> S3Error:
    return S3Error("MalformedXML", "The document is not well formed, or not what is wanted here.")
