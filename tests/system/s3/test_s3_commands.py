"""Everyday programs copy, move and rename: the AWS command line, s3cmd, rclone, and s3fs as a file system."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.engines.s3_served import KEY, Served
from tests.support.needs import why_no_mount
from tests.support.waiting import wait_until

BUCKET = "blocks"
SMALL = random.Random(11).randbytes(300_000)
BIG = random.Random(12).randbytes(18 << 20)
"""Copied in parts, where a program is told to from 8 or 16 MiB on."""
ODD = "sm all+%41"
"""A name that is another one if it is escaped once too often, or once too seldom."""
SECONDS = 90.0


class Commands:
    """Programs that run against a door, in a folder with the files `small` and `big`."""

    def __init__(self, s3: Served, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{s3.port}"
        self.secret = KEY.secret.reveal().decode()
        self.client = s3.client()
        (folder / "small").write_bytes(SMALL)
        (folder / "big").write_bytes(BIG)
        # Nothing of whoever runs the tests: no proxies, certificates, profiles.
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}

    def run(self, *words: str, more: Mapping[str, str] | None = None) -> str:
        """What a program says, which has to end well."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment | dict(more or {}), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def stored(self) -> dict[str, bytes]:
        """All objects, by their keys."""
        rows = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        read = self.client.get_object
        return {row["Key"]: read(Bucket=BUCKET, Key=row["Key"])["Body"].read() for row in rows}


@pytest.fixture
def commands(s3: Served, tmp_path: Path) -> Iterator[Commands]:
    (tmp_path / "home").mkdir()
    made = Commands(s3, tmp_path / "home")
    yield made
    made.client.close()


def program(name: str, package: str) -> str:
    """The path of a program; the test is skipped where there is none, and says what is missing."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine: {package}")
    return found


def test_the_aws_command_line_moves_objects_whole_and_in_parts(commands: Commands) -> None:
    aws = program("aws", "make setup installs awscli")
    (commands.folder / "config").write_text(
        "[default]\nregion = us-east-1\ns3 =\n  multipart_threshold = 8MB\n"
    )
    keys = {
        "AWS_ACCESS_KEY_ID": KEY.key_id, "AWS_SECRET_ACCESS_KEY": commands.secret,
        "AWS_CONFIG_FILE": str(commands.folder / "config"), "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip

    def s3(*words: str) -> str:
        return commands.run(aws, "--endpoint-url", commands.url, "s3", *words, "--no-progress", more=keys)

    s3("cp", "small", f"s3://{BUCKET}/a/{ODD}")
    s3("cp", "big", f"s3://{BUCKET}/a/big")
    s3("mv", f"s3://{BUCKET}/a/{ODD}", f"s3://{BUCKET}/b/{ODD}!")
    s3("mv", f"s3://{BUCKET}/a/big", f"s3://{BUCKET}/b/big")
    assert commands.stored() == {f"b/{ODD}!": SMALL, "b/big": BIG}
    s3(
        "mv",
        "--recursive",
        f"s3://{BUCKET}/b/",
        f"s3://{BUCKET}/c/",
        "--storage-class",
        "STANDARD_IA",
        "--sse",
    )
    assert commands.stored() == {f"c/{ODD}!": SMALL, "c/big": BIG}


def test_s3cmd_copies_moves_and_changes_headers(commands: Commands, s3: Served) -> None:
    s3cmd = program("s3cmd", "apt-get install s3cmd")
    lines = {
        "access_key": KEY.key_id, "secret_key": commands.secret, "use_https": "False",
        "host_base": f"127.0.0.1:{s3.port}", "host_bucket": f"127.0.0.1:{s3.port}",
        "multipart_copy_chunk_size_mb": "16",
    }  # fmt: skip
    text = "".join(f"{name} = {value}\n" for name, value in lines.items())
    (commands.folder / "s3cfg").write_text("[default]\n" + text)

    def run(*words: str) -> str:
        return commands.run(s3cmd, "-c", "s3cfg", "--no-progress", *words)

    run("put", "small", f"s3://{BUCKET}/a/{ODD}")
    run("put", "big", f"s3://{BUCKET}/a/big")
    run("cp", f"s3://{BUCKET}/a/{ODD}", f"s3://{BUCKET}/a/copy")
    run("mv", f"s3://{BUCKET}/a/{ODD}", f"s3://{BUCKET}/b/{ODD}!")
    run("mv", f"s3://{BUCKET}/a/big", f"s3://{BUCKET}/b/big")
    assert commands.stored() == {"a/copy": SMALL, f"b/{ODD}!": SMALL, "b/big": BIG}
    run("modify", "--add-header=x-amz-meta-layer:7", f"s3://{BUCKET}/a/copy")
    assert "x-amz-meta-layer: 7" in run("info", f"s3://{BUCKET}/a/copy")
    assert commands.stored()["a/copy"] == SMALL


def test_rclone_moves_objects_and_sets_their_times(commands: Commands) -> None:
    rclone = program("rclone", "apt-get install rclone")
    site = {
        "TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": commands.url, "REGION": "us-east-1",
        "ACCESS_KEY_ID": KEY.key_id, "SECRET_ACCESS_KEY": commands.secret,
        "COPY_CUTOFF": "8Mi", "UPLOAD_CUTOFF": "8Mi", "CHUNK_SIZE": "8Mi",
    }  # fmt: skip
    keys = {f"RCLONE_CONFIG_G_{name}": value for name, value in site.items()}

    def run(*words: str) -> str:
        return commands.run(rclone, "--config", "/dev/null", *words, more=keys)

    run("copyto", "small", f"g:{BUCKET}/a/{ODD}")
    run("copyto", "big", f"g:{BUCKET}/a/big")
    run("moveto", f"g:{BUCKET}/a/{ODD}", f"g:{BUCKET}/b/{ODD}!")
    run("moveto", f"g:{BUCKET}/a/big", f"g:{BUCKET}/b/big")
    assert commands.stored() == {f"b/{ODD}!": SMALL, "b/big": BIG}
    run("touch", f"g:{BUCKET}/b/big", "--timestamp", "2020-01-01T00:00:00")
    assert "2020-01-01" in run("lsl", f"g:{BUCKET}/b")
    assert commands.stored()["b/big"] == BIG


@pytest.fixture
def mounted(commands: Commands) -> Iterator[Path]:
    s3fs = program("s3fs", "apt-get install s3fs")
    if why := why_no_mount():
        pytest.skip(why)
    keys = {"AWSACCESSKEYID": KEY.key_id, "AWSSECRETACCESSKEY": commands.secret}
    mount = commands.folder / "mount"
    mount.mkdir()
    options = [
        f"url={commands.url}", "use_path_request_style", "endpoint=us-east-1", "multipart_size=10",
        "singlepart_copy_limit=10", f"tmpdir={commands.folder}",
    ]  # fmt: skip
    words = [s3fs, BUCKET, str(mount), "-f", *(word for option in options for word in ("-o", option))]
    log = (commands.folder / "s3fs.log").open("wb")
    with log, subprocess.Popen(words, env=commands.environment | keys, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: process.poll() is not None or os.path.ismount(mount), 30, "s3fs to mount")
            assert process.poll() is None, (commands.folder / "s3fs.log").read_text()
            yield mount
        finally:
            subprocess.run(["umount", str(mount)], check=False, capture_output=True)
            process.terminate()


def test_s3fs_renames_files_and_folders_and_changes_their_modes(commands: Commands, mounted: Path) -> None:
    (mounted / "folder").mkdir()
    shutil.copyfile(commands.folder / "small", mounted / "small")
    shutil.copyfile(commands.folder / "big", mounted / "folder" / "big")
    (mounted / "small").rename(mounted / "folder" / ODD)
    (mounted / "folder" / "big").rename(mounted / "folder" / "large")
    (mounted / "folder").rename(mounted / "other")
    (mounted / "other" / ODD).chmod(0o600)
    os.utime(mounted / "other" / ODD, (1_600_000_000, 1_600_000_000))
    found = (mounted / "other" / ODD).stat()
    assert (found.st_mode & 0o777, found.st_mtime) == (0o600, 1_600_000_000)
    assert (mounted / "other" / "large").read_bytes() == BIG
    stored = {key: body for key, body in commands.stored().items() if not key.endswith("/")}
    assert stored == {f"other/{ODD}": SMALL, "other/large": BIG}
