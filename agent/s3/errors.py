"""Refusals of the S3 door: the codes of S3, each with its HTTP status.

An `S3Error` becomes the answer to a request. `closes`: the connection cannot go on, because the beginning of
the next request is unknown.
"""

import errno
from collections.abc import Sequence
from typing import Final

from agent.fs.interface import FsError

STATUS: Final = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "BadDigest": 400,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "ExpiredToken": 400,
    "IllegalLocationConstraintException": 400,
    "IncompleteBody": 400,
    "InsufficientStorage": 507,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidBucketName": 400,
    "InvalidChunkSizeError": 403,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidStorageClass": 400,
    "InvalidURI": 400,
    "KeyTooLongError": 400,
    "MalformedXML": 400,
    "MetadataTooLarge": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "RequestHeaderSectionTooLarge": 400,
    "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyBuckets": 400,
    "XAmzContentSHA256Mismatch": 400,
}
"""Of "Error responses" of Amazon's S3 API reference; InsufficientStorage is WebDAV's (RFC 4918, 11.5), for S3
is never full."""


class S3Error(Exception):
    """The request is refused, with one of the codes above."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        closes: bool = False,
        headers: Sequence[tuple[str, str]] = (),
        details: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.closes = closes
        self.headers = headers
        """Further headers of the answer."""
        self.details = details
        """Further elements of the answer's document."""

    @property
    def status(self) -> int:
        return STATUS[self.code]


def slow_down(why: str) -> S3Error:
    """The refusal for a tenant that has too much under way."""
    return S3Error("SlowDown", why)


def of_file_system(error: FsError) -> S3Error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return S3Error("InsufficientStorage", "The volumes of this tenant have no room for it.")
    if error.errno == errno.EFBIG:
        return S3Error("EntityTooLarge", "The object is larger than objects may be.")
    return S3Error("ServiceUnavailable", "The enclosures did not answer in time. Please try again.")
