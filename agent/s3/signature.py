"""AWS signature version 4, the verifying side. Without I/O; the time is an argument.

"Authenticating Requests (AWS Signature Version 4)" of Amazon's S3 API reference. A signature covers the
method, the path, the query, the headers that it names and the hash of the body (or a word in place of it).
Every `x-amz-*` header and `host` must be among the named headers: anybody could change an unsigned one.

The canonical form is made from the decoded request, each byte outside `A-Za-z0-9-._~` written `%XX`; S3
encodes a path once and does not remove dot segments.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from agent.inline.secrets import SecretKey
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SKEW_SECONDS: Final = 900.0
PRESIGNED_SECONDS_MAX: Final = 7 * 24 * 3600
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
SIGNING_KEYS_MAX: Final = 1024
"""Derived keys that are kept: one of each access key and day, of which ten may be under way (presigned)."""

_NOBODY: Final = SecretKey(b"nobody's" * 4)
_SCOPE = re.compile(r"([A-Za-z0-9]{4,128})/(\d{8})/([A-Za-z0-9-]{1,64})/s3/aws4_request")
_SIGNATURE = re.compile(r"[0-9a-f]{64}")
_STAMP = re.compile(r"\d{8}T\d{6}Z")
_PLAIN = re.compile(r"[A-Za-z0-9._~-]*")
"""Text that needs no quoting, as most."""
_SPACES = re.compile(r"[ \t]+")
_SIGNED_HEADERS = re.compile(r"[a-z0-9-]+(?:;[a-z0-9-]+)*")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The signed part of a request. `path` is decoded; headers have lower-case names and one value each, in
    Latin-1."""

    method: str
    path: bytes
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Signer:
    """The signer of a request, with the inputs for the signatures of its chunks."""

    access_key: AccessKey
    payload: str
    """`x-amz-content-sha256`: a hash in hex, or a word that says how the body is signed."""
    stamp: str
    scope: str
    signature: str
    signing_key: SecretKey = field(repr=False)

    def chunk_signature(self, previous: str, hashes: str, kind: str = "PAYLOAD") -> str:
        """The signature of a chunk, from its predecessor's; `hashes` is the tail of the signed text."""
        text = f"{ALGORITHM}-{kind}\n{self.stamp}\n{self.scope}\n{previous}\n{hashes}"
        return hmac.new(self.signing_key.reveal(), text.encode(), hashlib.sha256).hexdigest()


def signing_key(secret: SecretKey, date: str, region: str, service: str = "s3") -> SecretKey:
    key = b"AWS4" + secret.reveal()
    for word in (date, region, service, "aws4_request"):
        key = hmac.digest(key, word.encode(), "sha256")
    return SecretKey(key)


class SigningKeys:
    """The keys that secrets sign with on a day: four hashes of a hash each, which are the same all day.

    Kept for one region alone, since a stranger names what region he likes. Lives in the door's event loop.
    """

    def __init__(self, region: str, most: int = SIGNING_KEYS_MAX) -> None:
        self._region = region
        self._most = most
        self._kept: dict[tuple[str, str], tuple[SecretKey, SecretKey]] = {}
        """By id of the access key and date, the one asked for longest ago first: the secret, and its key."""

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, key_id: str, secret: SecretKey, date: str, region: str) -> SecretKey:
        if region != self._region:
            return signing_key(secret, date, region)
        kept = self._kept.pop((key_id, date), None)
        if kept is None or kept[0] is not secret:
            kept = secret, signing_key(secret, date, region)
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
        self._kept[key_id, date] = kept
        return kept[1]


def canonical_request(request: HttpRequest, signed: Sequence[str], payload: str) -> str:
    """The text whose hash is signed, in Latin-1."""
    query = sorted((_quoted(name), _quoted(value)) for name, value in request.query)
    return "\n".join(
        (
            request.method,
            quote(request.path, safe="/~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{_SPACES.sub(' ', request.headers.get(name, '')).strip(' ')}" for name in signed),
            "",
            ";".join(signed),
            payload,
        )
    )


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else quote(text, safe="~")


def signature_of(key: SecretKey, stamp: str, scope: str, canonical: str) -> str:
    """The signature in hex."""
    text = f"{ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode('latin-1')).hexdigest()}"
    return hmac.digest(key.reveal(), text.encode(), "sha256").hex()


@dataclass(frozen=True, slots=True)
class _Claim:
    credential: str
    signed: str
    signature: str
    stamp: str
    payload: str
    query: Sequence[tuple[str, str]]
    lifetime: float | None
    """Of a presigned URL, in seconds."""


def verify(
    request: HttpRequest, keys: Mapping[str, AccessKey], now: float, kept: SigningKeys | None = None
) -> Signer:
    """The signer of the request. Raises S3Error; `now` is seconds since the epoch."""
    presigned = any(name == "X-Amz-Algorithm" for name, _ in request.query)
    if presigned and "authorization" in request.headers:
        raise S3Error("InvalidArgument", "A request has one signature.")
    claim = _presigned(request) if presigned else _by_header(request)
    scope = _SCOPE.fullmatch(claim.credential)
    if (
        scope is None
        or _SIGNED_HEADERS.fullmatch(claim.signed) is None
        or _SIGNATURE.fullmatch(claim.signature) is None
        or _STAMP.fullmatch(claim.stamp) is None
    ):
        raise S3Error("AuthorizationHeaderMalformed", "The parts of the signature are not in their form.")
    key_id, date, region = scope.groups()
    _check_time(claim, date, now)
    signed = claim.signed.split(";")
    _check_signed(request, signed, presigned)
    known = keys.get(key_id)
    # The work is done for an unknown key too, so that time does not tell which keys are known.
    secret, whose = (known.secret, key_id) if known is not None else (_NOBODY, "")
    key = signing_key(secret, date, region) if kept is None else kept.of(whose, secret, date, region)
    words = claim.credential.partition("/")[2]
    bare = HttpRequest(request.method, request.path, claim.query, request.headers)
    expected = signature_of(key, claim.stamp, words, canonical_request(bare, signed, claim.payload))
    matches = hmac.compare_digest(expected, claim.signature)
    if known is None:
        raise S3Error("InvalidAccessKeyId", "The access key is not known here.")
    if not matches:
        raise S3Error("SignatureDoesNotMatch", "The signature is not that of this request and secret.")
    return Signer(known, claim.payload, claim.stamp, words, claim.signature, key)


def check_region(signer: Signer, request: HttpRequest, region: str) -> None:
    """Raises S3Error where a valid signature is for another region than `region`.

    The refusal names the right one, as S3's does: SDKs read it there, or in the header, and sign anew.
    """
    said = signer.scope.split("/")[1]
    if said == region:
        return
    code = "AuthorizationHeaderMalformed"
    if "authorization" not in request.headers:
        code = "AuthorizationQueryParametersError"
    raise S3Error(
        code,
        f"The region {said!r} of the signature is wrong; expecting {region!r}.",
        headers=[("x-amz-bucket-region", region)],
        details=[("Region", region)],
    )


def _by_header(request: HttpRequest) -> _Claim:
    header = request.headers.get("authorization", "")
    if not header and any(name == "AWSAccessKeyId" for name, _ in request.query):
        raise S3Error("InvalidRequest", f"Signature version 2 is not taken. Sign with {ALGORITHM} (s3v4).")
    if not header:
        raise S3Error("AccessDenied", "The request is not signed.")
    word, _, rest = header.partition(" ")
    if word != ALGORITHM:
        raise S3Error("InvalidRequest", f"The signing algorithm must be {ALGORITHM}.")
    fields: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in fields:
            raise S3Error("AuthorizationHeaderMalformed", "The Authorization header is not in its form.")
        fields[name] = value
    if set(fields) != {"Credential", "SignedHeaders", "Signature"}:
        raise S3Error(
            "AuthorizationHeaderMalformed", "The Authorization header lacks a part, or has one more."
        )
    payload = request.headers.get("x-amz-content-sha256", "")
    if not payload:
        raise S3Error("InvalidRequest", "x-amz-content-sha256 is missing.")
    stamp = request.headers.get("x-amz-date", "")
    if not stamp:
        raise S3Error("AccessDenied", "x-amz-date is missing.")
    credential, signed, signature = fields["Credential"], fields["SignedHeaders"], fields["Signature"]
    return _Claim(credential, signed, signature, stamp, payload, request.query, None)


def _presigned(request: HttpRequest) -> _Claim:
    fields: dict[str, str] = {}
    for name, value in request.query:
        if name.startswith("X-Amz-"):
            if name in fields:
                raise S3Error("AuthorizationQueryParametersError", f"{name} is there twice.")
            fields[name] = value
    try:
        algorithm, lifetime = fields["X-Amz-Algorithm"], fields["X-Amz-Expires"]
        credential, signed = fields["X-Amz-Credential"], fields["X-Amz-SignedHeaders"]
        signature, stamp = fields["X-Amz-Signature"], fields["X-Amz-Date"]
    except KeyError as missing:
        raise S3Error("AuthorizationQueryParametersError", f"{missing.args[0]} is missing.") from None
    if algorithm != ALGORITHM or not lifetime.isascii() or not lifetime.isdecimal() or len(lifetime) > 7:
        raise S3Error("AuthorizationQueryParametersError", "X-Amz-Algorithm or X-Amz-Expires is not usable.")
    if not 1 <= int(lifetime) <= PRESIGNED_SECONDS_MAX:
        raise S3Error("AuthorizationQueryParametersError", "X-Amz-Expires is 1 to 604800 seconds.")
    query = [(name, value) for name, value in request.query if name != "X-Amz-Signature"]
    # The maker of a presigned URL seldom knows the body. If so, its hash is in the query or in a signed
    # header.
    payload = fields.get("X-Amz-Content-Sha256", UNSIGNED)
    if "x-amz-content-sha256" in signed.split(";"):
        payload = request.headers.get("x-amz-content-sha256", payload)
    if not payload.isascii():
        raise S3Error("AuthorizationQueryParametersError", "X-Amz-Content-Sha256 is no hash.")
    return _Claim(credential, signed, signature, stamp, payload, query, float(lifetime))


def _check_time(claim: _Claim, date: str, now: float) -> None:
    try:
        # Of digits alone, as _STAMP has seen to; strptime takes ten times as long.
        at = datetime.fromisoformat(claim.stamp.removesuffix("Z")).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise S3Error("AccessDenied", "The date of the signature is none.") from None
    if claim.stamp[:8] != date:
        raise S3Error("AuthorizationHeaderMalformed", "The date of the scope is not that of the request.")
    if claim.lifetime is None:
        if abs(now - at) > SKEW_SECONDS:
            raise S3Error(
                "RequestTimeTooSkewed", "The clocks of client and agent differ by more than 15 minutes."
            )
    elif not at - SKEW_SECONDS <= now <= at + claim.lifetime:
        raise S3Error("AccessDenied", "The presigned URL has expired, or is of the future.")


def _check_signed(request: HttpRequest, signed: Sequence[str], presigned: bool) -> None:
    wanted = {"host", *(name for name in request.headers if name.startswith("x-amz-"))}
    if presigned:
        wanted.discard("x-amz-content-sha256")
    if unsigned := wanted - set(signed):
        raise S3Error("AccessDenied", f"Headers are not signed that must be: {', '.join(sorted(unsigned))}.")
    if list(signed) != sorted(set(signed)):
        raise S3Error("AuthorizationHeaderMalformed", "SignedHeaders must be in order, each once.")
