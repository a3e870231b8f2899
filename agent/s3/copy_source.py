"""What a copy copies: the source that its headers name, their conditions, and a part's range.

"CopyObject" and "UploadPartCopy" of Amazon's S3 API reference. A source is `bucket/key` or `/bucket/key`,
percent-encoded once. A `+` is a space there, as S3 reads it; a key with a plus has it as `%2B`.
"""

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import unquote_to_bytes

from agent.config.s3_section import BUCKET
from agent.s3.errors import S3Error
from agent.s3.get_object import names
from agent.s3.index import StoredObject
from agent.s3.requests import SOURCE, check_key

RANGE: Final = SOURCE + "-range"
_VERSION: Final = "?versionId="
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


def source_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Bucket and key of the source. Raises S3Error; a bucket that is not the tenant's is found to be none."""
    text = headers[SOURCE]
    if _VERSION in text:
        raise S3Error("NotImplemented", "Objects have no versions here, so a source names none.")
    if _ESCAPE.search(text):
        raise S3Error("InvalidArgument", f"{SOURCE} has a percent sign that escapes nothing.")
    try:
        # A header is bytes, which its decoding kept in Latin-1.
        name = unquote_to_bytes(text.replace("+", "%20").encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidArgument", f"{SOURCE} is not UTF-8.") from None
    bucket, slash, key = name.removeprefix("/").partition("/")
    if not slash or not key or BUCKET.fullmatch(bucket) is None:
        raise S3Error("InvalidArgument", f"{SOURCE} is bucket/key, percent-encoded.")
    check_key(key)
    return bucket, key


def check_conditions(headers: Mapping[str, str], found: StoredObject) -> None:
    """Raises S3Error where a condition on the source does not hold. A condition on ETags, where there is one,
    decides before that on times of its kind."""
    match, none_match = headers.get(SOURCE + "-if-match"), headers.get(SOURCE + "-if-none-match")
    since, until = headers.get(SOURCE + "-if-modified-since"), headers.get(SOURCE + "-if-unmodified-since")
    changed = found.changed_ns // 1_000_000_000
    if match is not None:
        holds = names(match, found.etag)
    else:
        holds = until is None or changed <= _seconds(until)
    if none_match is not None:
        holds &= not names(none_match, found.etag)
    elif since is not None:
        holds &= changed > _seconds(since)
    if not holds:
        raise S3Error("PreconditionFailed", "A condition on the source of the copy does not hold.")


def range_of(headers: Mapping[str, str], size: int) -> tuple[int, int]:
    """Start and end (exclusive) of the bytes of a source that a part takes. Raises S3Error.

    Unlike a reader's range, one that ends behind the source is refused: a part would be shorter than asked.
    """
    text = headers.get(RANGE)
    if text is None:
        return 0, size
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2]) < int(match[1]):
        raise S3Error("InvalidArgument", f"{RANGE} is bytes=FIRST-LAST.")
    if int(match[2]) >= size:
        raise S3Error("InvalidRange", f"The source has {size} bytes.")
    return int(match[1]), int(match[2]) + 1


def _seconds(text: str) -> float:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        raise S3Error("InvalidArgument", "A condition on the source of the copy has no date.") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
