"""The XML documents of clients: elements and text, nothing else of XML.

Each is a root with leaves, and rows with leaves; a leaf has text alone, and is there once. A document type
declaration is refused at its first byte, so there are no entities. Elements, text and tags have bounds. A
document is read in slices, between which the event loop serves others.
"""

from collections.abc import Iterator, Mapping
from typing import Final
from xml.parsers import expat

from agent.s3.errors import S3Error

DOCUMENT_BYTES_MAX: Final = 4 << 20
TEXT_MAX: Final = 4096
ROWS_MAX: Final = 10_000
LEAVES_MAX: Final = 16
"""Elements of one row, or outside of rows."""
SLICE_BYTES: Final = 8 << 10
"""Read in 2 ms, whatever its content."""


class RowsReader:
    """Reads one document: `rows`, each as its leaves, and the `leaves` of the root itself."""

    def __init__(self, root: str, row: str) -> None:
        self._root = root
        self._row = row
        self._path: list[str] = []
        self._text = ""
        self._others = 0
        self._events = 0
        self.rows: list[dict[str, str]] = []
        self.leaves: dict[str, str] = {}

    def read(self, document: bytes) -> Iterator[None]:
        """Each step reads a slice. Raises S3Error."""
        parser = expat.ParserCreate("UTF-8", " ")  # whatever encoding the document declares
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._take_text
        parser.buffer_text = True
        if len(document) > DOCUMENT_BYTES_MAX:
            raise _malformed()
        try:
            for at in range(0, len(document), SLICE_BYTES):
                events = self._events
                parser.Parse(document[at : at + SLICE_BYTES], False)
                # A tag may have any number of attributes, which expat makes at its end. No tag of ours is as
                # long as a slice.
                if events == self._events and at + SLICE_BYTES < len(document):
                    raise _malformed()
                yield
            parser.Parse(b"", True)
        except expat.ExpatError:
            raise _malformed() from None

    def _refuse(self, *_: object) -> None:
        raise _malformed()

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        self._events += 1
        self._path.append(name.rpartition(" ")[2])
        self._text = ""
        if self._path[0] != self._root or len(self._path) > (3 if self._path[1:2] == [self._row] else 2):
            raise _malformed()
        if self._path[1:] == [self._row]:
            if len(self.rows) == ROWS_MAX:
                raise _malformed()
            self.rows.append({})
            self._others = 0
            return
        self._others += 1
        leaves = self.rows[-1] if len(self._path) == 3 else self.leaves
        if self._others > LEAVES_MAX or self._path[-1] in leaves:
            raise _malformed()

    def _take_text(self, data: str) -> None:
        self._events += 1
        self._text += data
        if len(self._text) > TEXT_MAX:
            raise _malformed()

    def _end(self, name: str) -> None:
        self._events += 1
        if len(self._path) == 3:
            self.rows[-1][self._path[2]] = self._text
        elif len(self._path) == 2 and self._path[1] != self._row:
            self.leaves[self._path[1]] = self._text
        self._path.pop()
        self._text = ""


def _malformed() -> S3Error:
    return S3Error("MalformedXML", "The document is malformed, or of another kind.")
