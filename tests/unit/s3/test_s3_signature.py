"""Signature version 4 against AWS's own examples, and against botocore for whatever it signs."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import hypothesis.strategies as st
import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given

from agent.inline.secrets import SecretKey
from agent.s3 import signature
from agent.s3.chunked import SIGNED, SIGNED_TRAILER, ChunkDecoder
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error
from agent.s3.requests import http_request
from agent.s3.signature import (
    EMPTY_SHA256,
    HttpRequest,
    Signer,
    SigningKeys,
    canonical_request,
    signature_of,
    signing_key,
    verify,
)

KEY = AccessKey("AKIAIOSFODNN7EXAMPLE", SecretKey(b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"), "default")
KEYS = {KEY.key_id: KEY}
THEN = datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC).timestamp()
"""The moment of all examples of Amazon's S3 API reference."""
SCOPE = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"


def signed_by(signed: str, signature: str) -> str:
    return f"AWS4-HMAC-SHA256 Credential={SCOPE},SignedHeaders={signed},Signature={signature}"


def example(method: str, target: str, headers: dict[str, str], authorization: str) -> HttpRequest:
    together = {
        "host": "examplebucket.s3.amazonaws.com",
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": EMPTY_SHA256,
        **headers,
        "authorization": authorization,
    }
    return http_request(
        method.encode(), target.encode(), [(name.encode(), text.encode()) for name, text in together.items()]
    )


GET = example(
    "GET", "/test.txt", {"range": "bytes=0-9"},
    signed_by(
        "host;range;x-amz-content-sha256;x-amz-date",
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
)  # fmt: skip
PUT = example(
    "PUT", "/test%24file.text",
    {
        "date": "Fri, 24 May 2013 00:00:00 GMT",
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
        "x-amz-content-sha256": "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
    },
    signed_by(
        "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
)  # fmt: skip
LIFECYCLE = example(
    "GET", "/?lifecycle", {},
    signed_by(
        "host;x-amz-content-sha256;x-amz-date",
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
)  # fmt: skip
LISTED = example(
    "GET", "/?max-keys=2&prefix=J", {},
    signed_by(
        "host;x-amz-content-sha256;x-amz-date",
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
)  # fmt: skip
PRESIGNED_TARGET = (
    "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=" + SCOPE.replace("/", "%2F")
    + "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
)  # fmt: skip
PRESIGNED = http_request(b"GET", PRESIGNED_TARGET.encode(), [(b"host", b"examplebucket.s3.amazonaws.com")])


@pytest.mark.parametrize("request_", [GET, PUT, LIFECYCLE, LISTED, PRESIGNED])
def test_the_examples_of_aws_are_signed_as_they_say(request_: HttpRequest) -> None:
    assert verify(request_, KEYS, THEN).access_key is KEY


def test_the_key_of_a_day_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    def deriving(*words: Any) -> SecretKey:
        made.append(words)
        return signing_key(*words)

    monkeypatch.setattr(signature, "signing_key", deriving)
    kept = SigningKeys("us-east-1", most=2)
    for _ in range(3):
        for request in (GET, PUT, PRESIGNED):
            by_kept, anew = verify(request, KEYS, THEN, kept), verify(request, KEYS, THEN)
            assert by_kept.signing_key.reveal() == anew.signing_key.reveal()
    assert len(made) == 1 + 9  # the judge derives each anew
    strange = changed(GET, path=b"/other")
    for _ in range(2):
        with pytest.raises(S3Error):
            verify(strange, KEYS, THEN, kept)
        with pytest.raises(S3Error):
            verify(GET, {}, THEN, kept)
    assert len(kept) == 2, "one more for all who are not known"


def test_what_strangers_name_takes_no_room_among_the_kept_keys() -> None:
    kept = SigningKeys("us-east-1", most=2)
    first = kept.of("A", KEY.secret, "20130524", "us-east-1")
    assert kept.of("A", KEY.secret, "20130524", "elsewhere").reveal() != first.reveal()
    assert len(kept) == 1
    for date in ("20130525", "20130526", "20130527"):
        assert kept.of("A", KEY.secret, date, "us-east-1").reveal() == (
            signing_key(KEY.secret, date, "us-east-1").reveal()
        )
    assert len(kept) == 2


def changed(request: HttpRequest, **fields: Any) -> HttpRequest:
    parts = {
        "method": request.method, "path": request.path, "query": request.query, "headers": request.headers
    }  # fmt: skip
    return HttpRequest(**{**parts, **fields})


CHANGES: dict[str, Callable[[HttpRequest], HttpRequest]] = {
    "method": lambda each: changed(each, method="DELETE"),
    "path": lambda each: changed(each, path=b"/test.txt2"),
    "query": lambda each: changed(each, query=[*each.query, ("versionId", "1")]),
    "host": lambda each: changed(each, headers={**each.headers, "host": "other.s3.amazonaws.com"}),
}


@pytest.mark.parametrize("request_", [GET, PRESIGNED])
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_is_changed_after_signing_is_refused(request_: HttpRequest, what: str) -> None:
    with pytest.raises(S3Error) as refused:
        verify(CHANGES[what](request_), KEYS, THEN)
    assert refused.value.code == "SignatureDoesNotMatch"


@pytest.mark.parametrize("seconds", [-901, 901])
def test_a_clock_that_is_15_minutes_off_is_refused(seconds: float) -> None:
    assert verify(GET, KEYS, THEN + seconds * 0.99)
    with pytest.raises(S3Error) as refused:
        verify(GET, KEYS, THEN + seconds)
    assert refused.value.code == "RequestTimeTooSkewed"


@pytest.mark.parametrize("seconds", [-901, 86_401])
def test_a_presigned_url_is_good_until_it_expires(seconds: float) -> None:
    assert verify(PRESIGNED, KEYS, THEN + 86_400)
    with pytest.raises(S3Error) as refused:
        verify(PRESIGNED, KEYS, THEN + seconds)
    assert refused.value.code == "AccessDenied"


def test_a_header_of_amazon_that_is_not_signed_is_refused() -> None:
    with pytest.raises(S3Error) as refused:
        verify(changed(GET, headers={**GET.headers, "x-amz-meta-owner": "mallory"}), KEYS, THEN)
    assert refused.value.code == "AccessDenied"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("", "AccessDenied"),
        ("Bearer x", "InvalidRequest"),
        ("AWS4-HMAC-SHA256 Credential=a", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=a,SignedHeaders=host,Signature=0", "AuthorizationHeaderMalformed"),
        (signed_by("host", "0" * 64).replace("/s3/", "/sts/"), "AuthorizationHeaderMalformed"),
        (signed_by("host", "0" * 64).replace("20130524", "20130523"), "AuthorizationHeaderMalformed"),
        (signed_by("host;range;x-amz-content-sha256;x-amz-date", "0" * 64), "SignatureDoesNotMatch"),
        (GET.headers["authorization"].replace("EXAMPLE", "STRANGER"), "InvalidAccessKeyId"),
    ],
)
def test_what_is_no_signature_of_a_known_key_is_refused(header: str, code: str) -> None:
    with pytest.raises(S3Error) as refused:
        verify(changed(GET, headers={**GET.headers, "authorization": header}), KEYS, THEN)
    assert refused.value.code == code


def test_a_signature_of_version_2_and_headers_out_of_order_are_called_by_their_names() -> None:
    old = http_request(b"GET", b"/a?AWSAccessKeyId=A&Signature=B&Expires=9999999999", [(b"host", b"x")])
    with pytest.raises(S3Error, match="version 2"):
        verify(old, KEYS, THEN)
    header = signed_by("x-amz-date;host;range;x-amz-content-sha256", "0" * 64)
    with pytest.raises(S3Error, match="in order"):
        verify(changed(GET, headers={**GET.headers, "authorization": header}), KEYS, THEN)


def test_a_header_is_signed_as_the_bytes_that_it_is() -> None:
    text = 'attachment; filename="\u00fc\u0160.txt"'
    request = AWSRequest("PUT", "http://h/b/k", headers={"Host": "h", "Content-Disposition": text}, data=b"")
    request.context["client_config"] = None
    S3SigV4Auth(Credentials(KEY.key_id, KEY.secret.reveal().decode()), "s3", "eu-west-1").add_auth(request)
    headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
    now = datetime.datetime.now(datetime.UTC).timestamp()
    assert verify(http_request(b"PUT", b"/b/k", headers), KEYS, now).access_key is KEY


def test_the_hash_of_a_body_in_a_presigned_url_is_what_the_body_must_have() -> None:
    target = PRESIGNED_TARGET.replace("&X-Amz-Date", f"&X-Amz-Content-Sha256={'0' * 64}&X-Amz-Date")
    with pytest.raises(S3Error) as refused:
        verify(
            http_request(b"GET", target.encode(), [(b"host", b"examplebucket.s3.amazonaws.com")]), KEYS, THEN
        )
    assert refused.value.code == "SignatureDoesNotMatch"
    http = http_request(b"GET", target.encode(), [(b"host", b"examplebucket.s3.amazonaws.com")])
    query = [(name, value) for name, value in http.query if name != "X-Amz-Signature"]
    bare = changed(http, query=query)
    key = signing_key(KEY.secret, "20130524", "us-east-1")
    scope = SCOPE.partition("/")[2]
    canonical = canonical_request(bare, ["host"], "0" * 64)
    signature = signature_of(key, "20130524T000000Z", scope, canonical)
    signed = changed(bare, query=[*query, ("X-Amz-Signature", signature)])
    assert verify(signed, KEYS, THEN).payload == "0" * 64


def test_two_signatures_at_once_are_refused() -> None:
    headers = {**PRESIGNED.headers, "authorization": GET.headers["authorization"]}
    with pytest.raises(S3Error):
        verify(changed(PRESIGNED, headers=headers), KEYS, THEN)


def test_a_signer_does_not_show_its_keys() -> None:
    signer = verify(GET, KEYS, THEN)
    assert "wJalr" not in repr(signer)
    assert signer.signing_key.reveal().hex() not in repr(signer)


# -- chunks ---------------------------------------------------------------------------------------

LONG = "66560"
SEED = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
CHUNKS = (
    b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648\r\n"
    + b"a" * 65_536 + b"\r\n"
    b"400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497\r\n"
    + b"a" * 1024 + b"\r\n"
    b"0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9\r\n\r\n"
)  # fmt: skip


def chunk_signer() -> Signer:
    headers = {
        "host": "s3.amazonaws.com",
        "content-encoding": "aws-chunked",
        "content-length": "66824",
        "x-amz-content-sha256": SIGNED,
        "x-amz-decoded-content-length": LONG,
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
    }
    names = sorted({*headers, "x-amz-date"})
    put = example("PUT", "/examplebucket/chunkObject.txt", headers, signed_by(";".join(names), SEED))
    return verify(put, KEYS, THEN)


@pytest.mark.parametrize("step", [1, 7, 4096, len(CHUNKS)])
def test_the_chunks_of_the_example_of_aws_are_those_of_its_signer(step: int) -> None:
    decoder, found = ChunkDecoder(chunk_signer(), int(LONG)), 0
    for at in range(0, len(CHUNKS), step):
        found += sum(len(part) for part in decoder.feed(CHUNKS[at : at + step]))
    decoder.finish()
    assert found == int(LONG)


def decoded(body: bytes, signer: Signer | None = None, length: int = int(LONG)) -> None:
    decoder = ChunkDecoder(signer or chunk_signer(), length)
    decoder.feed(body)
    decoder.finish()


@pytest.mark.parametrize("at", [2, 30, 100, 65_700, len(CHUNKS) - 30, len(CHUNKS) - 3])
def test_a_chunk_with_one_byte_changed_is_refused(at: int) -> None:
    broken = bytearray(CHUNKS)
    broken[at] ^= 1
    with pytest.raises(S3Error):
        decoded(bytes(broken))


@pytest.mark.parametrize("cut", [1, 3, 100, 1200, 66_000])
def test_a_body_in_chunks_that_ends_early_is_refused(cut: int) -> None:
    with pytest.raises(S3Error) as refused:
        decoded(CHUNKS[:-cut])
    assert refused.value.code == "IncompleteBody"


def test_chunks_do_not_change_places_and_none_is_left_out() -> None:
    first, second = CHUNKS.index(b"400;"), CHUNKS.index(b"0;chunk-signature=b6")
    for body in (CHUNKS[first:], CHUNKS[first:second] + CHUNKS[:first] + CHUNKS[second:]):
        with pytest.raises(S3Error):
            decoded(body)


@pytest.mark.parametrize(
    "body", [b"x\r\n", b"-1\r\n", b"ffffffffffff\r\n", b"5" * 2000, b"0\n", b"0\r\n\r\nmore"]
)
def test_what_is_no_chunk_is_refused(body: bytes) -> None:
    with pytest.raises(S3Error):
        decoded(body)


TRAILER_SEED = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
TRAILED = (
    b"10000;chunk-signature=b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2\r\n"
    + b"a" * 65_536 + b"\r\n"
    b"400;chunk-signature=1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7\r\n"
    + b"a" * 1024 + b"\r\n"
    b"0;chunk-signature=2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992\r\n"
    b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
    b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n"
)  # fmt: skip


def trailer_signer() -> Signer:
    return Signer(
        KEY, SIGNED_TRAILER, "20130524T000000Z", SCOPE.partition("/")[2], TRAILER_SEED,
        chunk_signer().signing_key,
    )  # fmt: skip


def test_trailers_of_the_example_of_aws_are_those_of_its_signer() -> None:
    decoder = ChunkDecoder(trailer_signer(), int(LONG))
    decoder.feed(TRAILED)
    decoder.finish()
    assert decoder.trailers == {"x-amz-checksum-crc32c": "sOO8/Q=="}


@pytest.mark.parametrize(
    "body", [TRAILED.replace(b"sOO8", b"sOO9"), TRAILED.replace(b"d81f", b"d81e"), TRAILED[:-92] + b"\r\n"]
)
def test_a_trailer_that_is_not_its_signers_is_refused(body: bytes) -> None:
    with pytest.raises(S3Error):
        decoded(body, trailer_signer())


# -- botocore -------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)


# A parameter of the signature's own is no client's to add.
PARAMETERS = NAMES.filter(lambda name: not name.startswith("X-Amz-"))


@given(key=NAMES, query=st.dictionaries(PARAMETERS, NAMES, max_size=3), presigned=st.booleans())
def test_whatever_botocore_signs_is_verified(key: str, query: dict[str, str], presigned: bool) -> None:
    # What clients send as it is would be normalised on its way; botocore signs the path that it is given.
    url = f"http://127.0.0.1:9036/blocks/{quote(key, safe='/~')}"
    if query:
        url += "?" + urlencode(query, quote_via=quote, safe="~")
    request = AWSRequest("GET", url, headers={"Host": "127.0.0.1:9036"})
    request.context["client_config"] = None
    credentials = Credentials(KEY.key_id, KEY.secret.reveal().decode())
    kind = S3SigV4QueryAuth if presigned else S3SigV4Auth
    kind(credentials, "s3", "eu-west-1").add_auth(request)
    parts = urlsplit(request.url)
    target = parts.path + ("?" + parts.query if parts.query else "")
    headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
    now = datetime.datetime.now(datetime.UTC).timestamp()
    if not presigned:
        headers = [each for each in headers if each[0] != b"host"] + [(b"host", b"127.0.0.1:9036")]
    else:
        headers = [(b"host", b"127.0.0.1:9036")]
    assert verify(http_request(b"GET", target.encode(), headers), KEYS, now).access_key is KEY
