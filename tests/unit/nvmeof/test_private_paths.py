"""A file of a secret is taken where nobody but root and this user could have put another in its place."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nvmeof.authentication import private_files
from nvmeof.authentication.private_files import SecretFileError, check_private, read_private, write_private
from tests.support.needs import needs_root

SOMEBODY = 4242
"""A user id that nobody here has."""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A key in a folder of its own."""
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    path = folder / "root.key"
    write_private(path, "a secret\n")
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(SecretFileError) as why:
        read_private(path, 100)
    for word in words:
        assert word in str(why.value)
    assert "a secret\n" not in str(why.value)
    with pytest.raises(SecretFileError):
        check_private(path)


def test_what_only_this_user_could_have_put_there_is_taken(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_private(key, 100) == b"a secret\n"
    monkeypatch.chdir(tmp_path)
    for way in ("keys/root.key", "./keys//root.key", "keys/../keys/root.key", "../../../../../.." + str(key)):
        assert read_private(Path(way), 100) == b"a secret\n"
        check_private(Path(way))


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o702, 0o770])
def test_a_folder_that_others_may_write_to_is_refused_with_the_line_that_mends_it(
    key: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "_is_private_group", lambda _: False)
    key.parent.chmod(mode)
    refused(key, f"folder {key.parent} ", f"chmod go-w {key.parent}", f"{mode:04o}")
    with pytest.raises(SecretFileError, match="chmod go-w"):
        write_private(key.parent / "another.key", "a secret\n")
    key.parent.chmod(0o755)
    assert read_private(key, 100) == b"a secret\n"


def test_so_is_one_further_up(key: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    refused(key, f"folder {tmp_path} ")


def test_a_sticky_folder_is_as_good_as_whose_the_file_in_it_is(key: Path) -> None:
    key.parent.chmod(0o1777)
    assert read_private(key, 100) == b"a secret\n"
    if os.geteuid() == 0:
        os.chown(key, SOMEBODY, -1)
        refused(key, f"belongs to user {SOMEBODY}", "chown root")


@needs_root
def test_a_file_of_another_user_is_refused(key: Path) -> None:
    os.chown(key, SOMEBODY, -1)
    refused(key, f"{key} belongs to user {SOMEBODY}", f"chown root {key}")


@needs_root
def test_a_folder_of_another_user_is_refused(key: Path) -> None:
    os.chown(key.parent, SOMEBODY, -1)
    refused(key, f"folder {key.parent} belongs to user {SOMEBODY}", "in a folder of root, or chown root")
    write_private(key.parent / "another.key", "for that user\n")


def test_links_of_root_and_of_this_user_are_followed_and_every_folder_on_the_way_counts(
    key: Path, tmp_path: Path
) -> None:
    """Kubernetes lays a secret out like that: key -> ..data/key, ..data -> ..2026_11_23."""
    mount = tmp_path / "mount"
    (mount / "..2026_11_23").mkdir(parents=True)
    write_private(mount / "..2026_11_23" / "root.key", "mounted\n")
    (mount / "..data").symlink_to("..2026_11_23")
    (mount / "root.key").symlink_to("..data/root.key")
    mount.chmod(0o1777)
    assert read_private(mount / "root.key", 100) == b"mounted\n"
    (tmp_path / "far").symlink_to(key)
    assert read_private(tmp_path / "far", 100) == b"a secret\n"
    key.parent.chmod(0o777)
    refused(tmp_path / "far", f"folder {key.parent} ")
    (mount / "..2026_11_23").chmod(0o777)
    refused(mount / "root.key", "..2026_11_23")


@needs_root
def test_a_link_of_another_user_is_refused_also_in_a_sticky_folder(key: Path, tmp_path: Path) -> None:
    link = tmp_path / "sticky" / "link"
    link.parent.mkdir()
    link.parent.chmod(0o1777)
    link.symlink_to(key)
    os.chown(link, SOMEBODY, -1, follow_symlinks=False)
    refused(link, f"is a link of user {SOMEBODY}")


def test_links_that_lead_nowhere_or_in_a_circle_are_errors(tmp_path: Path) -> None:
    (tmp_path / "none").symlink_to("missing")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "root").symlink_to("/")
    refused(tmp_path / "none", "No such file")
    refused(tmp_path / "circle", "Too many levels")
    refused(tmp_path / "root", "no regular file")
    refused(tmp_path / "missing" / "deeper", "No such file")
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "deeper", "Not a directory")


def test_a_file_exchanged_between_look_and_opening_is_looked_at_again(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is what was opened."""
    opened = os.open

    def exchange(path: str, flags: int, *rest: int, **more: int) -> int:
        if path == key.name and flags & os.O_NONBLOCK:
            key.unlink()
            os.mkfifo(key, 0o600)
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(private_files.os, "open", exchange)
    with pytest.raises(SecretFileError, match="no regular file"):
        read_private(key, 100)


def test_no_descriptor_is_left_open(key: Path, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    before = len(os.listdir("/proc/self/fd"))
    for path in (key, tmp_path / "circle", tmp_path / "none" / "deeper", tmp_path):
        for _ in range(3):
            try:
                check_private(path)
            except SecretFileError:
                continue
    key.chmod(0o640)
    refused(key)
    key.parent.chmod(0o777)
    refused(key)
    assert len(os.listdir("/proc/self/fd")) == before


class Facts:
    """Of a folder: owner, group, mode."""

    def __init__(self, uid: int, gid: int, mode: int = 0o775) -> None:
        self.st_uid, self.st_gid, self.st_mode = uid, gid, stat.S_IFDIR | mode


def test_a_group_that_is_one_users_alone_is_that_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions with a umask of 0002 have one for each user."""

    class Group:
        gr_name, gr_mem = "ann", ["ann"]

    def user(name: str, uid: int, gid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))

    users = [user("ann", 1000, 1000), user("ben", 1001, 1001)]
    monkeypatch.setattr(private_files.pwd, "getpwuid", lambda uid: users[uid - 1000])
    monkeypatch.setattr(private_files.pwd, "getpwall", lambda: users)
    monkeypatch.setattr(private_files.grp, "getgrgid", lambda _: Group)
    is_private: Callable[[object], bool] = private_files._is_private_group  # type: ignore[assignment]
    assert is_private(Facts(1000, 1000))
    assert not is_private(Facts(1001, 1000)), "of ann's group, and ben's"
    users.append(user("cid", 1002, 1000))
    assert not is_private(Facts(1000, 1000)), "another has it as his own"
    users.pop()
    Group.gr_mem = ["ann", "ben"]
    assert not is_private(Facts(1000, 1000))


def test_users_outside_of_the_user_namespace_are_known_by_its_map() -> None:
    assert not private_files._is_outside(1000)
    is_whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str((1 << 32) - 1)]
    assert private_files._is_outside(65534) is not is_whole
