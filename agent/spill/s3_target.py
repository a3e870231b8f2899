"""G4 in a bucket, by awscrt's S3 client: an object for each bundle.

A bundle is stored by one PUT that asks for no object of that name to be there; where the store does not know
that condition, a HEAD goes before it. Credentials are read anew after they were refused, at most once in 10
s."""

import io
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit
from xml.etree.ElementTree import ParseError, fromstring

from agent.s3.credentials import read_credentials_file
from agent.spill.target import Gone, Stored, Taken, Target, TargetError

PUT_SECONDS: Final = 60.0
CALL_SECONDS: Final = 10.0
"""For a HEAD, a DELETE, or a page of a listing."""
PAGE_BYTES_MAX: Final = 4 << 20
PAGES_MAX: Final = 100_000
EMPTY_PAGES_MAX: Final = 1000
"""Pages of a listing without one name that was asked for; a store may skip what was deleted by such."""
CREDENTIALS_SECONDS: Final = 10.0
_REFUSED: Final = frozenset((400, 401, 403))
_NOT_KNOWN: Final = frozenset((400, 405, 501))
_CODE: Final = re.compile(rb"<Code>([A-Za-z]{1,64})</Code>")


class _Answer:
    """The answer to one request."""

    def __init__(self, most: int) -> None:
        self.status = 0
        self.body = bytearray()
        self.code = ""
        """What the store calls its refusal."""
        self.too_long = False
        self.request: Any = None
        """Kept for as long as the answer may come."""
        self._most = most

    def on_headers(self, status_code: int, headers: object, **_: object) -> None:
        self.status = status_code

    def on_body(self, chunk: bytes, offset: int, **_: object) -> None:
        if len(self.body) + len(chunk) > self._most:
            self.too_long = True
        else:
            self.body += chunk


class _Asked(Future[_Answer]):
    """An answer on its way, and the request, which may be given up."""

    request: Any = None


class _Range(Future[bytes]):
    asked: _Asked | None = None


class S3Target(Target):
    def __init__(self, endpoint: str, bucket: str, region: str, credentials_file: Path) -> None:
        """Raises ConfigError for credentials that cannot be used. The bucket is not asked."""
        from awscrt import io as crt_io

        parts = urlsplit(endpoint)
        self._host: Final = parts.netloc
        self._is_tls: Final = parts.scheme == "https"
        self._bucket: Final = bucket
        self._region: Final = region
        self._credentials_file: Final = credentials_file
        self._credentials_read = time.monotonic()
        self._loops: Final = crt_io.EventLoopGroup(1)
        self._bootstrap: Final = crt_io.ClientBootstrap(self._loops, crt_io.DefaultHostResolver(self._loops))
        self._lock: Final = threading.Lock()
        self._conditions = True
        self._client: Any = self._new_client()

    def _new_client(self) -> Any:
        from awscrt import auth, s3

        key = read_credentials_file(self._credentials_file, "")[0]
        provider = auth.AwsCredentialsProvider.new_static(key.key_id, key.secret.reveal().decode())
        return s3.S3Client(
            bootstrap=self._bootstrap,
            region=self._region,
            tls_mode=s3.S3RequestTlsMode.ENABLED if self._is_tls else s3.S3RequestTlsMode.DISABLED,
            signing_config=s3.create_default_s3_signing_config(
                region=self._region, credential_provider=provider
            ),
            throughput_target_gbps=10,
        )

    def _was_refused(self) -> None:
        """Read the credentials anew: they may have been replaced."""
        with self._lock:
            if time.monotonic() - self._credentials_read < CREDENTIALS_SECONDS:
                return
            self._credentials_read = time.monotonic()
        try:
            self._client = self._new_client()
        except Exception:
            return  # The ones of before stay, and the refusal says what is wrong.

    def _request(
        self,
        method: str,
        operation: str,
        name: str,
        headers: Sequence[tuple[str, str]] = (),
        *,
        query: str = "",
        body: memoryview | None = None,
        most: int = 1 << 16,
    ) -> _Asked:
        """An answer of any status; TargetError where none came."""
        from awscrt import http, s3

        answer, outcome = _Answer(most), _Asked()
        path = f"/{self._bucket}{'/' + quote(name) if name else ''}{query}"
        sent = http.HttpHeaders([("host", self._host), *headers])
        if body is not None:
            sent.add("content-length", str(len(body)))

        def on_done(error: Any = None, error_body: bytes | None = None, **_: object) -> None:
            status = answer.status or getattr(error, "status_code", None) or 0
            answer.status, answer.code = status, _code_untrusted(error_body or bytes(answer.body))
            if answer.too_long:
                outcome.set_exception(TargetError(f"{self._host} answers with more than was asked for"))
            elif not status:
                outcome.set_exception(TargetError(f"{self._host} {_words_of(error)}"))
            elif error is not None and status < 300:
                outcome.set_exception(TargetError(f"{self._host} answered in part"))
            else:
                if status in _REFUSED:
                    self._was_refused()
                outcome.set_result(answer)

        request = http.HttpRequest(method, path, sent, io.BytesIO(body) if body is not None else None)
        try:
            outcome.request = answer.request = self._client.make_request(
                type=s3.S3RequestType.DEFAULT,
                operation_name=operation,
                request=request,
                on_headers=answer.on_headers,
                on_body=answer.on_body,
                on_done=on_done,
            )
        except Exception as error:
            outcome.set_exception(TargetError(f"{self._host} {_words_of(error)}"))
        return outcome

    def _answer(self, asked: _Asked, seconds: float) -> _Answer:
        try:
            return asked.result(seconds)
        except TimeoutError:
            asked.request.cancel()
            raise TargetError(f"{self._host} does not answer within {seconds:g} s") from None

    def _refusal(self, answer: _Answer) -> TargetError:
        status, code = answer.status, f" {answer.code}" if answer.code else ""
        meaning = ""
        if status == 404:
            meaning = f": there is no bucket {self._bucket}; make it"
        elif status in _REFUSED:
            meaning = ": see credentials_file, region and the bucket's rights"
        elif 300 <= status < 400:
            meaning = ": the bucket is elsewhere; see endpoint and region"
        return TargetError(f"{self._host} answers {status}{code}{meaning}")

    def check(self) -> None:
        """Every request is answered for itself, so nothing is asked."""

    def put(self, name: str, data: memoryview) -> None:
        for _ in range(2):
            condition = [("if-none-match", "*")] if self._conditions else []
            if (
                not condition
                and self._answer(self._request("HEAD", "HeadObject", name), CALL_SECONDS).status == 200
            ):
                raise Taken(name)
            asked = self._request("PUT", "PutObject", name, condition, body=data)
            answer = self._answer(asked, PUT_SECONDS)
            status = answer.status
            if status == 412:
                raise Taken(name)
            if condition and status in _NOT_KNOWN:
                self._conditions = False
                continue
            if status != 200:
                raise self._refusal(answer)
            return

    def fetch(self, name: str, offset: int, size: int) -> "Future[bytes]":
        wanted = [("range", f"bytes={offset}-{offset + size - 1}")]
        came = _Range()

        def pass_on(asked: "Future[_Answer]") -> None:
            error = asked.exception()
            if error is not None:
                came.set_exception(error)
                return
            answer = asked.result()
            if answer.status == 206:
                came.set_result(bytes(answer.body))
            elif answer.status == 200:
                came.set_exception(TargetError(f"{self._host} does not answer with ranges"))
            elif answer.status == 416:
                came.set_result(b"")
            elif answer.status == 404:
                came.set_exception(Gone(name))
            else:
                came.set_exception(self._refusal(answer))

        came.asked = self._request("GET", "GetObject", name, wanted, most=size)
        came.asked.add_done_callback(pass_on)
        return came

    def give_up(self, asked: "Future[bytes]") -> None:
        if isinstance(asked, _Range) and asked.asked is not None and asked.asked.request is not None:
            asked.asked.request.cancel()

    def delete(self, name: str) -> None:
        answer = self._answer(self._request("DELETE", "DeleteObject", name), CALL_SECONDS)
        if answer.status not in (200, 204, 404):
            raise self._refusal(answer)

    def names(self, prefix: str) -> Iterator[Stored]:
        following, empty = "", 0
        for _ in range(PAGES_MAX):
            token = f"&continuation-token={quote(following, safe='')}" if following else ""
            query = f"?list-type=2&prefix={quote(prefix, safe='')}{token}"
            asked = self._request("GET", "ListObjectsV2", "", query=query, most=PAGE_BYTES_MAX)
            answer = self._answer(asked, CALL_SECONDS)
            if answer.status != 200:
                raise self._refusal(answer)
            before = following
            found, following = _page_untrusted(bytes(answer.body))
            # A store that takes no notice of the prefix shows what others have there: nobody may delete that.
            named = [each for each in found if each.name.startswith(prefix)]
            yield from named
            if not following:
                return
            empty = 0 if named else empty + 1
            if following == before or empty == EMPTY_PAGES_MAX:
                break
        raise TargetError(f"{self._host} does not come to the end of its listing")

    def close(self) -> None:
        self._client = None


def _words_of(error: object) -> str:
    """What awscrt says of a request without an answer, in a few words and without its class."""
    name = str(getattr(error, "name", "") or type(error).__name__)
    if name in ("AWS_ERROR_S3_SLOW_DOWN", "AWS_ERROR_S3_INTERNAL_ERROR"):
        return "answers again and again that it is busy, or out of order (5xx)"
    return "does not answer: " + re.sub(r"^AWS_(ERROR_)?", "", name).lower().replace("_", " ")


def _code_untrusted(document: bytes) -> str:
    """What a refusal is called in its document: letters alone, for a log line."""
    found = _CODE.search(document[:4096])
    return found[1].decode() if found is not None else ""


def _page_untrusted(document: bytes) -> tuple[list[Stored], str]:
    """A page of ListObjectsV2, and the token of the next one. Raises TargetError."""
    found: list[Stored] = []
    following = ""
    try:
        # As text: what encoding the document declares is of no account, so no entity hides in another.
        text = document.decode()
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise TargetError("the listing has a document type")
        for element in fromstring(text):
            tag = element.tag.rpartition("}")[2]
            if tag == "Contents":
                fields = {each.tag.rpartition("}")[2]: each.text or "" for each in element}
                found.append(Stored(fields.get("Key", ""), max(0, int(fields.get("Size", "")))))
            elif tag == "NextContinuationToken":
                following = element.text or ""
    except (ParseError, ValueError):
        raise TargetError("the listing is no ListBucketResult") from None
    return found, following
