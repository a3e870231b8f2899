"""Bucket, key and operation of a request, from its target and headers.

A key is a name and no path: `..` and `//` have no meaning, here or below (agent/s3/index.py keeps keys as
bytes). Unknown sub-resources and parameters are refused, not ignored.
"""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from agent.config.s3_section import BUCKET
from agent.s3.answers import SendAtOnce
from agent.s3.checksums import ALGORITHMS, PREFIX
from agent.s3.errors import S3Error
from agent.s3.signature import HttpRequest
from agent.s3.xml_out import UNFIT

KEY_BYTES_MAX: Final = 1024
TARGET_BYTES_MAX: Final = 8192
PARAMETERS_MAX: Final = 64
_TOKEN = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_PRINTABLE = re.compile(r"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")
_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


class Operation(enum.StrEnum):
    """The operations of the door, by S3's names."""

    LIST_BUCKETS = "ListBuckets"
    CREATE_BUCKET = "CreateBucket"
    DELETE_BUCKET = "DeleteBucket"
    HEAD_BUCKET = "HeadBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    LIST_OBJECTS = "ListObjectsV2"
    LIST_OBJECTS_V1 = "ListObjects"
    DELETE_OBJECTS = "DeleteObjects"
    LIST_UPLOADS = "ListMultipartUploads"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "HeadObject"
    PUT_OBJECT = "PutObject"
    DELETE_OBJECT = "DeleteObject"
    CREATE_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    COMPLETE_UPLOAD = "CompleteMultipartUpload"
    ABORT_UPLOAD = "AbortMultipartUpload"
    LIST_PARTS = "ListParts"
    COPY_OBJECT = "CopyObject"
    UPLOAD_PART_COPY = "UploadPartCopy"
    GET_BUCKET_VERSIONING = "GetBucketVersioning"
    GET_OBJECT_TAGGING = "GetObjectTagging"


_SERVICE: Final = {("GET", frozenset[str]()): Operation.LIST_BUCKETS}
_OF_BUCKET: Final = {
    ("PUT", frozenset[str]()): Operation.CREATE_BUCKET,
    ("DELETE", frozenset[str]()): Operation.DELETE_BUCKET,
    ("HEAD", frozenset[str]()): Operation.HEAD_BUCKET,
    ("GET", frozenset({"location"})): Operation.GET_BUCKET_LOCATION,
    ("GET", frozenset({"versioning"})): Operation.GET_BUCKET_VERSIONING,
    ("GET", frozenset({"list-type"})): Operation.LIST_OBJECTS,
    ("GET", frozenset[str]()): Operation.LIST_OBJECTS_V1,
    ("GET", frozenset({"uploads"})): Operation.LIST_UPLOADS,
    ("POST", frozenset({"delete"})): Operation.DELETE_OBJECTS,
}
_OF_OBJECT: Final = {
    ("GET", frozenset[str]()): Operation.GET_OBJECT,
    ("HEAD", frozenset[str]()): Operation.HEAD_OBJECT,
    ("PUT", frozenset[str]()): Operation.PUT_OBJECT,
    ("DELETE", frozenset[str]()): Operation.DELETE_OBJECT,
    ("POST", frozenset({"uploads"})): Operation.CREATE_UPLOAD,
    ("PUT", frozenset({"uploadId", "partNumber"})): Operation.UPLOAD_PART,
    ("POST", frozenset({"uploadId"})): Operation.COMPLETE_UPLOAD,
    ("DELETE", frozenset({"uploadId"})): Operation.ABORT_UPLOAD,
    ("GET", frozenset({"uploadId"})): Operation.LIST_PARTS,
    ("GET", frozenset({"tagging"})): Operation.GET_OBJECT_TAGGING,
}
_COPIES: Final = {
    Operation.PUT_OBJECT: Operation.COPY_OBJECT,
    Operation.UPLOAD_PART: Operation.UPLOAD_PART_COPY,
}
"""What is meant where a header names a source."""
_DECIDES: Final = frozenset(
    {"location", "versioning", "list-type", "uploads", "delete", "uploadId", "partNumber", "tagging"}
)
_AS_ANSWERED: Final = frozenset(
    {
        "response-content-type", "response-content-disposition", "response-content-encoding",
        "response-content-language", "response-cache-control", "response-expires",
    }
)  # fmt: skip
_TAKEN: Final = {
    Operation.LIST_BUCKETS: frozenset({"prefix", "max-buckets", "continuation-token"}),
    Operation.LIST_OBJECTS: frozenset(
        {
            "prefix", "delimiter", "max-keys", "encoding-type", "start-after", "continuation-token",
            "fetch-owner",
        }
    ),
    Operation.LIST_OBJECTS_V1: frozenset({"prefix", "delimiter", "max-keys", "encoding-type", "marker"}),
    Operation.LIST_UPLOADS: frozenset(
        {"prefix", "delimiter", "max-uploads", "encoding-type", "key-marker", "upload-id-marker"}
    ),
    Operation.LIST_PARTS: frozenset({"max-parts", "part-number-marker"}),
    Operation.GET_OBJECT: _AS_ANSWERED,
    Operation.HEAD_OBJECT: _AS_ANSWERED,
}  # fmt: skip
"""Parameters of an operation beside those that select it; all of them have an effect."""
_OF_NOTHING: Final = frozenset({"x-id"})
"""SDKs add it to name the operation."""
_KNOWN: Final = _OF_NOTHING.union(*_TAKEN.values())
_OF_SIGNATURE: Final = frozenset(
    {
        "X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders",
        "X-Amz-Signature", "X-Amz-Content-Sha256",
    }
)  # fmt: skip
_NOT_HERE: Final = (
    "x-amz-bypass-governance-retention", "x-amz-copy-source-", "x-amz-expected-bucket-owner",
    "x-amz-grant-", "x-amz-if-match-", "x-amz-mfa", "x-amz-mp-object-size", "x-amz-object-lock-",
    "x-amz-security-token", "x-amz-server-side-encryption-", "x-amz-source-expected-bucket-owner",
    "x-amz-tagging", "x-amz-website-redirect-location", "x-amz-write-offset-bytes",
)  # fmt: skip
"""Prefixes of headers that ask for missing features: refused, not ignored."""
_ONLY: Final = {
    "x-amz-acl": "private",
    "x-amz-bucket-object-lock-enabled": "false",
    "x-amz-object-ownership": "BucketOwnerEnforced",
    "x-amz-server-side-encryption": "AES256",
}
"""Headers of which one value is the only behaviour."""
_CHECKSUMS: Final = frozenset({*ALGORITHMS, "algorithm", "mode", "type"})
"""Endings of `x-amz-checksum-`; an unknown checksum could not be verified."""
ALGORITHM: Final = PREFIX + "algorithm"
_CHOICES: Final = {
    "x-amz-metadata-directive": ("COPY", "REPLACE"),
    "x-amz-tagging-directive": ("COPY", "REPLACE"),
    ALGORITHM: tuple(name.upper() for name in ALGORITHMS),
    PREFIX + "mode": ("ENABLED",),
    PREFIX + "type": ("FULL_OBJECT", "COMPOSITE"),
}
"""Headers with a choice of words."""
_STORAGE_CLASSES: Final = frozenset(
    {
        "STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER",
        "GLACIER_IR", "DEEP_ARCHIVE", "OUTPOSTS", "SNOW", "EXPRESS_ONEZONE", "FSX_OPENZFS",
    }
)  # fmt: skip
"""All are taken, and mean the same here."""
SOURCE: Final = "x-amz-copy-source"
_OF_SOURCE: Final = {
    SOURCE: {Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY},
    SOURCE + "-range": {Operation.UPLOAD_PART_COPY},
    **{
        f"{SOURCE}-if-{condition}": {Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY}
        for condition in ("match", "none-match", "modified-since", "unmodified-since")
    },
}
"""Headers of a copy, each with its operations; elsewhere they are refused."""
_NAMED_ANYHOW: Final = frozenset({*_OF_SOURCE, "x-amz-tagging-directive"})
"""Headers that are known, though they begin as some that are not. An object has no tags to replace."""
_CONDITIONS: Final = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")


@dataclass(frozen=True, slots=True)
class S3Request:
    """One request. `bucket` and `key` are empty where it names none."""

    headers: Mapping[str, str]
    """Names in lower case; with those in the query of a presigned URL."""
    operation: Operation
    bucket: str
    key: str
    parameters: Mapping[str, str]
    is_client_gone: Callable[[], bool] = lambda: False
    """Asked now and then by what takes long and moves no byte of the client's."""
    send_at_once: SendAtOnce | None = None
    """Of a client whom a thread may answer that is not the event loop's."""
    room: Callable[[int], memoryview | None] | None = None
    """Memory for a body of so many bytes, where it is one piece; None: it is read into other memory."""

    @property
    def body_headers(self) -> Mapping[str, str]:
        """Headers about the body. With CompleteMultipartUpload a checksum is the object's."""
        if self.operation is not Operation.COMPLETE_UPLOAD:
            return self.headers
        return {name: value for name, value in self.headers.items() if not name.startswith(PREFIX)}

    @property
    def resource(self) -> str:
        return f"/{self.bucket}/{self.key}" if self.bucket else "/"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The bucket of a Host header: by a table of hosts, or as the first label before a domain."""

    domain: str = ""
    table: Mapping[str, str] | None = None

    def bucket_of(self, host: str) -> str:
        """Empty: the path names it."""
        bare = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        bare = bare.lower()
        if self.table and bare in self.table:
            return self.table[bare]
        if self.domain and bare.endswith("." + self.domain):
            return bare.removesuffix("." + self.domain)
        return ""


def http_request(method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> HttpRequest:
    """The request, decoded. Raises S3Error; header names are in lower case already."""
    if len(target) > TARGET_BYTES_MAX:
        raise S3Error("InvalidURI", "The target is too long.")
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/") or _ESCAPE.search(target) or not target.isascii():
        raise S3Error("InvalidURI", "The target is not in its form.")
    if query.count(b"&") >= PARAMETERS_MAX:
        raise S3Error("InvalidURI", "There are too many parameters.")
    pairs = []
    for part in query.split(b"&") if query else []:
        name, _, value = part.partition(b"=")
        pairs.append((_text(unquote_to_bytes(name)), _text(unquote_to_bytes(value))))
    together: dict[str, str] = {}
    for raw_name, raw_value in headers:
        field, text = raw_name.decode("ascii"), raw_value.decode("latin-1")
        together[field] = f"{together[field]},{text}" if field in together else text
    return HttpRequest(method.decode("ascii"), unquote_to_bytes(path), pairs, together)


def s3_request(
    http: HttpRequest,
    hosts: Hosts,
    is_client_gone: Callable[[], bool] = lambda: False,
    send_at_once: SendAtOnce | None = None,
) -> S3Request:
    """The request as one of S3. Raises S3Error."""
    bucket = hosts.bucket_of(http.headers.get("host", ""))
    rest = _text(http.path)[1:]
    if bucket:
        key = rest
    else:
        bucket, _, key = rest.partition("/")
    if bucket and BUCKET.fullmatch(bucket) is None:
        raise S3Error("InvalidBucketName", "That is no name for a bucket.")
    if key and not bucket:
        raise S3Error("InvalidURI", "The path names a key and no bucket.")
    if key:
        check_key(key)
    parameters: dict[str, str] = {}
    headers = dict(http.headers)
    for name, value in http.query:
        if name in _OF_SIGNATURE:
            continue
        if name.lower().startswith("x-amz-") and name.lower() not in headers:
            # Makers of presigned URLs put headers into the query, which is signed. Headers are bytes.
            headers[name.lower()] = value.encode().decode("latin-1")
            continue
        if name in parameters:
            raise S3Error("InvalidArgument", "A parameter is there twice.")
        parameters[name] = value
    for header, value in headers.items():
        is_missing = header.startswith(_NOT_HERE) and header not in _NAMED_ANYHOW
        if is_missing or _ONLY.get(header, value) != value:
            raise S3Error("NotImplemented", f"{header} is not known here, or not with that value.")
        if header.startswith(PREFIX) and header.removeprefix(PREFIX) not in _CHECKSUMS:
            raise S3Error("NotImplemented", f"{header} is no checksum that is known here.")
        if header in _CHOICES and value.upper() not in _CHOICES[header]:
            raise S3Error("InvalidRequest", f"{header} is one of {', '.join(_CHOICES[header])}.")
        if header == "x-amz-storage-class" and value not in _STORAGE_CLASSES:
            raise S3Error("InvalidStorageClass", "That is no storage class of S3.")
        is_fit = _TOKEN.fullmatch(header) and _PRINTABLE.fullmatch(value)
        if header.startswith("x-amz-meta-") and not is_fit:
            raise S3Error("InvalidArgument", "Metadata is not in the form of a header.")
    if "content-length" in headers and "transfer-encoding" in headers:
        raise S3Error("InvalidRequest", "A body has one length.", closes=True)
    table = _OF_OBJECT if key else _OF_BUCKET if bucket else _SERVICE
    operation = table.get((http.method, _DECIDES.intersection(parameters)))
    if parameters.keys() - _DECIDES - _KNOWN:
        raise S3Error("NotImplemented", "A parameter or sub-resource is not known here.")
    if SOURCE in headers and operation is not None:
        operation = _COPIES.get(operation, operation)
    if operation is None or (operation is Operation.LIST_OBJECTS and parameters["list-type"] != "2"):
        raise S3Error("MethodNotAllowed", "That is not done to this resource.")
    if parameters.keys() - _DECIDES - _OF_NOTHING - _TAKEN.get(operation, frozenset()):
        raise S3Error("NotImplemented", "A parameter is not one of this operation here.")
    if any(operation not in of for header, of in _OF_SOURCE.items() if header in headers):
        raise S3Error("NotImplemented", "A header about the source of a copy is not one of this operation.")
    if http.method == "DELETE" and any(condition in headers for condition in _CONDITIONS):
        raise S3Error("NotImplemented", "A delete has no conditions here.")
    return S3Request(headers, operation, bucket, key, parameters, is_client_gone, send_at_once)


def check_key(key: str) -> None:
    """Raises S3Error for a key that S3 or this door does not take."""
    if len(key.encode()) > KEY_BYTES_MAX:
        raise S3Error("KeyTooLongError", f"A key has {KEY_BYTES_MAX} bytes at the most.")
    if not key or UNFIT.search(key):
        raise S3Error("InvalidArgument", "A key has no control characters.")


def whole_number(parameters: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A parameter that counts, cut to `most`. Raises S3Error."""
    text = parameters.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise S3Error("InvalidArgument", f"{name} is no count.")
    return min(int(text), most)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Start and end (exclusive) of a Range header; None where it is to be ignored (RFC 9110, 14.2).

    Several ranges are ignored, as S3 does. Raises S3Error where nothing of the object is in it.
    """
    match = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", header.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, end = max(0, size - int(match[2])), size
    else:
        start, end = int(match[1]), size if not match[2] else min(size, int(match[2]) + 1)
        if match[2] and int(match[2]) < start:
            return None
    if start >= end:
        says = [("accept-ranges", "bytes"), ("content-range", f"bytes */{size}")]
        raise S3Error("InvalidRange", "The object has no such bytes.", headers=says)
    return start, end


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "The target is not UTF-8.") from None
