"""Clients of what is kept for good: files of /fs, and objects of the S3 door.

Promised is what docs/limits.md says of them: what was synced or acknowledged is there, in the version that
was or in one that was begun since, while its enclosure is; an error meanwhile is normal.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from agent.s3.credentials import read_credentials_file
from tests.support.campaign.client import Away, Client
from tests.support.campaign.findings import LOST, WRONG, Findings
from tests.support.campaign.kv_clients import AGENT_AWAY
from tests.support.campaign.pod import AGENTS, BUCKET, S3_TENANT, Pod
from tests.support.campaign.values import content, judged, name_of

PIECE = 64 << 10
PIECES_MAX = 10
FILES_MAX = 40
FILE_SECONDS = 60.0
"""Waiting for another operation on one file (docs/concurrency.md)."""
OBJECT_SECONDS = 80.0
"""A place among the bodies, a thread, and a silent door (docs/concurrency.md)."""
OBJECTS_MAX = 20
SETTLED_SECONDS = 40.0
"""After healing: in doubt for 12 s after a lost write, and the enclosure back before."""
REFUSED = frozenset({errno.EIO, errno.ENOSPC, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM})


@dataclass
class Kept:
    """A file or an object: what was promised of it and what has been begun, by piece."""

    name: str
    promised: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    gone: bool = False
    """Removing it was begun, or its loss was counted."""

    def judge(self, piece: int, data: bytes | memoryview) -> str:
        """What is wrong with a piece that was read; "" where nothing is."""
        if not self.promised[piece] and not any(data):
            return ""
        read = judged(name_of(self.name, piece), data)
        if read.wrong:
            return read.wrong
        if not self.promised[piece] <= read.version <= self.begun[piece]:
            return f"version {read.version}, promised {self.promised[piece]}, begun {self.begun[piece]}"
        return ""


class FileClient(Client):
    """Makes, writes over, syncs, reads and removes files below one folder of /fs."""

    def __init__(self, pod: Pod, seed: int, findings: Findings, stop: threading.Event) -> None:
        super().__init__("FileClient", seed, findings, stop)
        self._folder = pod.mount(AGENTS[0]) / "fs" / "campaign"
        self._files: dict[str, Kept] = {}
        self._number = 0
        self._aligned = mmap.mmap(-1, PIECE)

    def turn(self) -> None:
        try:
            self._turn()
        except OSError as error:
            if error.errno in AGENT_AWAY or not os.path.exists(self._folder.parent):
                raise Away from error
            if error.errno not in REFUSED:
                raise
            self.findings.note("files: EIO and the like")

    def _turn(self) -> None:
        self._folder.mkdir(exist_ok=True)
        files = [each for each in self._files.values() if not each.gone]
        kind = self.dice.random()
        if not files or (kind < 0.2 and len(files) < FILES_MAX):
            self._number += 1
            kept = Kept(f"file-{self._number}")
            self._files[kept.name] = kept
            self._write(kept, range(self.dice.randint(1, PIECES_MAX)))
            return
        kept = self.dice.choice(files)
        if kind < 0.45:
            count = len(kept.begun)
            self._write(kept, sorted({self.dice.randrange(count + 1) for _ in range(3)}))
        elif kind < 0.5:
            kept.gone = True
            with self.timed("files removed", FILE_SECONDS):
                (self._folder / kept.name).unlink(missing_ok=True)
        else:
            self._check(kept, final=False)

    def _write(self, kept: Kept, pieces: Any) -> None:
        synced: dict[int, int] = {}
        with self.timed("files written", FILE_SECONDS):
            descriptor = os.open(self._folder / kept.name, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                for piece in pieces:
                    if piece >= len(kept.begun):
                        kept.begun.append(0)
                        kept.promised.append(0)
                    kept.begun[piece] += 1
                    data = content(name_of(kept.name, piece), kept.begun[piece], PIECE)
                    if os.pwrite(descriptor, data, piece * PIECE) == PIECE:
                        synced[piece] = kept.begun[piece]
                if self.dice.random() < 0.8:
                    os.fsync(descriptor)
                else:
                    synced.clear()
            finally:
                os.close(descriptor)
        for piece, version in synced.items():
            kept.promised[piece] = version
        self.findings.note("files synced", bool(synced))

    def _check(self, kept: Kept, *, final: bool) -> None:
        with self.timed("files read", FILE_SECONDS):
            try:
                descriptor = os.open(self._folder / kept.name, os.O_RDONLY | os.O_DIRECT)
            except FileNotFoundError:
                if not os.path.exists(self._folder.parent):
                    raise Away from None
                if any(kept.promised):
                    self._lose(kept, "is gone")
                kept.gone = True
                return
            try:
                for piece, promised in enumerate(kept.promised):
                    count = os.preadv(descriptor, [self._aligned], piece * PIECE)
                    if count < PIECE and promised:
                        self._lose(kept, f"ends in piece {piece} of {len(kept.promised)}")
                        return
                    if count == PIECE and (wrong := kept.judge(piece, self._aligned[:])):
                        self.findings.found(WRONG, f"{kept.name}, piece {piece}: {wrong}")
                        kept.gone = True
                        return
            except OSError as error:
                if final and error.errno == errno.EIO and any(kept.promised):
                    self._lose(kept, "does not read")
                    return
                raise
            finally:
                os.close(descriptor)

    def _lose(self, kept: Kept, how: str) -> None:
        kept.gone = True
        self.findings.found(LOST, f"{kept.name} {how}; it was synced")

    def settle(self) -> None:
        """Everything is healed: look at all that was promised. On any thread, when this one has ended."""
        until = time.monotonic() + SETTLED_SECONDS
        for kept in list(self._files.values()):
            while not kept.gone and any(kept.promised):
                last = time.monotonic() > until
                try:
                    self._check(kept, final=last)
                    break
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    time.sleep(0.2)
        self.findings.note("files looked at in the end", sum(not each.gone for each in self._files.values()))


class ObjectClient(Client):
    """Puts, reads and removes objects by the S3 door."""

    def __init__(self, pod: Pod, seed: int, findings: Findings, stop: threading.Event) -> None:
        super().__init__("ObjectClient", seed, findings, stop)
        self._pod = pod
        self._objects: dict[str, Kept] = {}
        self._s3: Any = None

    def turn(self) -> None:
        try:
            self._turn()
        except (BotoCoreError, ClientError) as error:
            self._refused(error)

    def _client(self) -> Any:
        if self._s3 is None:
            [key] = read_credentials_file(self._pod.credentials, S3_TENANT)
            self._s3 = Session().client(
                "s3",
                endpoint_url=self._pod.s3_url,
                aws_access_key_id=key.key_id,
                aws_secret_access_key=key.secret.reveal().decode(),
                region_name="us-east-1",
                config=Config(
                    retries={"total_max_attempts": 1},
                    s3={"addressing_style": "path"},
                    connect_timeout=5,
                    read_timeout=OBJECT_SECONDS,
                ),
            )
        return self._s3

    def _turn(self) -> None:
        client = self._client()
        kept = self._objects.setdefault(f"object-{self.dice.randrange(OBJECTS_MAX)}", Kept("", [0], [0]))
        kept.name = kept.name or next(name for name, each in self._objects.items() if each is kept)
        kind = self.dice.random()
        if not kept.begun[0] or kind < 0.3:
            kept.begun[0] += 1
            version = kept.begun[0]
            body = content(name_of(kept.name, 0), version, self.dice.choice((1000, 100_000, 700_000)))
            with self.timed("objects put", OBJECT_SECONDS):
                client.put_object(Bucket=BUCKET, Key=kept.name, Body=body)
            kept.promised[0] = version
            self.findings.note("objects acknowledged")
        elif kind < 0.35:
            kept.promised[0] = 0
            with self.timed("objects removed", OBJECT_SECONDS):
                client.delete_object(Bucket=BUCKET, Key=kept.name)
        else:
            self._check(kept)

    def _check(self, kept: Kept) -> None:
        promised = kept.promised[0]
        try:
            with self.timed("objects read", OBJECT_SECONDS):
                body = self._client().get_object(Bucket=BUCKET, Key=kept.name)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("NoSuchKey", "404"):
                raise
            if promised:
                kept.promised[0] = 0
                self.findings.found(LOST, f"{kept.name} is gone; version {promised} was acknowledged")
            return
        if wrong := kept.judge(0, body):
            self.findings.found(WRONG, f"{kept.name}: {wrong}")
            kept.promised[0] = 0

    def _refused(self, error: Exception) -> None:
        self.findings.note("objects: refused or away")
        code = error.response["Error"]["Code"] if isinstance(error, ClientError) else ""
        if not code:
            raise Away from error

    def settle(self) -> None:
        """As that of files."""
        until = time.monotonic() + SETTLED_SECONDS
        for kept in self._objects.values():
            while kept.promised[0]:
                try:
                    self._check(kept)
                    break
                except (ClientError, BotoCoreError) as error:
                    if time.monotonic() > until:
                        self.findings.found(LOST, f"{kept.name} does not read: {error}")
                        break
                    time.sleep(0.2)
        self.findings.note(
            "objects looked at in the end", sum(bool(each.promised[0]) for each in self._objects.values())
        )
