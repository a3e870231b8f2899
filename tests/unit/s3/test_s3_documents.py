"""Documents of clients: XML that is more than it should be is refused, and costs nothing."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from agent.http.connection import http_time
from agent.s3.errors import S3Error
from agent.s3.xml_in import SLICE_BYTES, RowsReader
from agent.s3.xml_out import document, error, iso_time

BOMB = b"""<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<Delete><Object><Key>&b;</Key></Object></Delete>"""
OUTSIDE = b"""<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><Delete><Object><Key>&e;</Key></Object></Delete>"""


def read_rows(document: bytes, root: str, row: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    reader = RowsReader(root, row)
    for _ in reader.read(document):
        pass
    return reader.rows, reader.leaves


def test_rows_and_leaves_are_read_with_a_namespace_and_without() -> None:
    for root in (b"<Delete>", b'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'):
        text = (
            root
            + b"<Quiet>true</Quiet><Object><Key>a&amp;b</Key></Object><Object><Key>c</Key></Object></Delete>"
        )
        assert read_rows(text, "Delete", "Object") == ([{"Key": "a&b"}, {"Key": "c"}], {"Quiet": "true"})


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        OUTSIDE,
        b"",
        b"<Delete>",
        b"<Other/>",
        b"<Delete><Object><Key>&unknown;</Key></Object></Delete>",
        b"<Delete>" + b"<a>" * 2000 + b"</a>" * 2000 + b"</Delete>",
        b"<Delete><Object><Key>" + b"k" * 5000 + b"</Key></Object></Delete>",
        b"<Delete>" + b"<Object/>" * 10_001 + b"</Delete>",
        b"<Delete>" + b" " * (4 << 20) + b"</Delete>",
        b'<?xml version="1.0" encoding="utf-16"?><\x00D\x00/\x00>\x00',
        b"\xff\xfe\x00",
        b"<Delete><Object><Key>a</Key>" + b"<a/>" * 17 + b"</Object></Delete>",
        b"<Delete>" + b"<a/>" * 17 + b"</Delete>",
        b"<Delete><Object " + b" ".join(b"a%x=''" % each for each in range(9000)) + b"/></Delete>",
        b"<Delete><!--" + b" " * 40_000 + b"--><Object/></Delete>",
        b"<Delete><Object><Key>a</Key><Key>b</Key></Object></Delete>",
        b"<Delete><Object><Key>a<b>k</b>c</Key></Object></Delete>",
        b"<Delete><Quiet>true</Quiet><Quiet>false</Quiet></Delete>",
        b"<Delete><Quiet><Object><Key>a</Key></Object></Quiet></Delete>",
    ],
    ids=range(20),
)
def test_what_is_no_such_document_is_refused(text: bytes) -> None:
    with pytest.raises(S3Error) as refused:
        read_rows(text, "Delete", "Object")
    assert refused.value.code == "MalformedXML"


def test_a_large_document_is_read_in_slices() -> None:
    rows = [{"PartNumber": str(number), "ETag": f'"{number:032x}"'} for number in range(10_000)]
    text = "".join(
        f"<Part><PartNumber>{row['PartNumber']}</PartNumber><ETag>{row['ETag']}</ETag></Part>" for row in rows
    )
    whole = f"<Complete>{text}</Complete>".encode()
    reader = RowsReader("Complete", "Part")
    assert sum(1 for _ in reader.read(whole)) == -(-len(whole) // SLICE_BYTES)
    assert reader.rows == rows


def test_an_error_carries_nothing_that_xml_cannot() -> None:
    text = error("InvalidArgument", "a\x01b", "/\x00\ufffe", "1")
    assert ElementTree.fromstring(text).findtext("Message") == "a\ufffdb"


def test_documents_escape_what_they_carry() -> None:
    text = document("Result", [("Key", "<&>"), ("More", True), ("Rows", [("Row", 1), ("Row", 2)])])
    assert text.endswith(
        b"<Key>&lt;&amp;&gt;</Key><More>true</More><Rows><Row>1</Row><Row>2</Row></Rows></Result>"
    )


def test_times_are_written_as_s3_and_http_have_them() -> None:
    moment = 1_369_353_600_123_000_000
    assert iso_time(moment) == "2013-05-24T00:00:00.123Z"
    assert http_time(moment) == "Fri, 24 May 2013 00:00:00 GMT"
