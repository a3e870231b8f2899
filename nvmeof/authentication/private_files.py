"""Files that hold a secret of any kind: made with mode 0600 and never over another, read by nobody else, and
opened by a path on which nobody else can put another in its place. No error quotes their content.

A file of mode 0600 in a folder of mode 0777 is anybody's to exchange. So each part of the path is opened and
checked, from `/` on, through symbolic links; a part is a descriptor, from which the next is reached, so no
part can be exchanged between check and use (as sshd's StrictModes):

* a folder belongs to root or to the user who runs this, and nobody else may write to it, but to a sticky one
  (/tmp), where only the owner of a file can rename or remove it;
* a link belongs to root or to that user; so does the file, which is regular.

Two exceptions: a folder that the private group of its user may write to (umask 0002) is its user's alone. In
a user namespace (a rootless container) all users outside show as the overflow user, root among them: folders
of that user are taken, links and files are not.
"""

import errno
import grp
import os
import pwd
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvmeof.errors import NvmeofError

LINKS_MAX: Final = 40
"""As many as Linux follows (path_resolution(7))."""
_PART: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL: Final = "system.posix_acl_access"


class SecretFileError(NvmeofError):
    """A file of secrets is not usable: ours to mend. `advice` says how."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(f"{message}; {advice}")
        self.message = message
        self.advice = advice


def write_private(path: Path, text: str) -> None:
    """Make a file of mode 0600, durable on return. Raises SecretFileError; nothing is overwritten."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        check_folder(path.parent)
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise SecretFileError(
            f"{path} exists, and a secret is never overwritten", "choose another path"
        ) from None
    except OSError as error:
        raise SecretFileError(f"cannot create {path}: {error.strerror}", "check the folder") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SecretFileError(f"cannot write {path}: {error.strerror}", "check the disk") from None


def read_private(path: Path, bytes_max: int) -> bytes:
    """All of a file that others can neither read nor exchange, of so many bytes at the most.

    Raises SecretFileError.
    """
    opened = _open_private(path)
    with open(opened.descriptor, "rb") as file:
        found = file.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise SecretFileError(f"{path} has more than {bytes_max} bytes", "name the file of the secret")
    return found


def check_private(path: Path) -> None:
    """For a file that a library reads by its name. Raises SecretFileError where others can read or exchange
    it."""
    os.close(_open_private(path).descriptor)


def _open_private(path: Path) -> "Opened":
    try:
        opened = open_guarded(path)
    except OSError as error:
        raise SecretFileError(f"cannot open {path}: {error.strerror}", "check the path") from None
    mode = stat.S_IMODE(opened.facts.st_mode)
    if mode & _others_bits(path):
        os.close(opened.descriptor)
        raise SecretFileError(
            f"{opened.path} can be read by others (mode {mode:04o})",
            f"chmod 600 {opened.path}, and think about who may have read it meanwhile",
        )
    return opened


def _others_bits(path: Path) -> int:
    """The mode bits that must not be set. A credential of systemd is root's and readable by an ACL, which the
    mode shows as the group's; its folder is closed to others.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return 0o037 if folder and path.parent == Path(folder) else 0o077


@dataclass(frozen=True, slots=True)
class Opened:
    """A regular file, open for reading: its descriptor, and where it lies once links are followed."""

    descriptor: int
    path: str
    facts: os.stat_result


def open_guarded(path: Path) -> Opened:
    """See the module's docstring. Raises SecretFileError, and OSError where a part is not there."""
    folder, name = _descend(path)
    try:
        where = os.path.join(folder.where, name)
        # O_NONBLOCK: a FIFO in its place must not hang us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder.descriptor)
    finally:
        os.close(folder.descriptor)
    facts = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(facts.st_mode):
            raise SecretFileError(f"{where} is no regular file", "name the file of the secret itself")
        if facts.st_uid not in (0, os.geteuid()):
            raise SecretFileError(
                f"{where} belongs to user {user_name(facts.st_uid)}, who can change it",
                f"chown {user_name(os.geteuid())} {where}, once you know what is in it",
            )
    except SecretFileError:
        os.close(descriptor)
        raise
    return Opened(descriptor, where, facts)


def check_folder(path: Path) -> None:
    """Raises SecretFileError where anybody could exchange what lies in a folder, and OSError.

    Its owner may: root makes a key in the folder of the service that is to read it.
    """
    folder, _ = _descend(path / "a file", of_anybody=True)
    os.close(folder.descriptor)


@dataclass(frozen=True, slots=True)
class _Folder:
    descriptor: int
    where: str


def _descend(path: Path, *, of_anybody: bool = False) -> tuple[_Folder, str]:
    """The folder that a path leads to, all parts of it looked at, and the name of the last part there.

    `of_anybody`: folders may belong to any user.
    """
    text = os.path.join(os.getcwd(), path)
    parts = deque(part for part in text.split("/") if part not in ("", "."))
    folder, links = _entered("/", None, "/", of_anybody), 0
    try:
        while parts:
            name = parts.popleft()
            where = os.path.join(folder.where, name)
            if name == "..":
                where = os.path.dirname(folder.where)
            try:
                part = os.open(name, _PART, dir_fd=folder.descriptor)
            except FileNotFoundError:
                if parts:
                    raise
                return folder, name  # the caller that opens it says so
            try:
                facts = os.fstat(part)
                if stat.S_ISLNK(facts.st_mode):
                    links += 1
                    _check_link(facts, where, links)
                    target = os.readlink("", dir_fd=part)
                    parts.extendleft(each for each in reversed(target.split("/")) if each not in ("", "."))
                    if target.startswith("/"):
                        folder = _entered("/", folder, "/", of_anybody)
                    continue
                if not parts and name != "..":
                    return folder, name
            finally:
                os.close(part)
            folder = _entered(name, folder, where, of_anybody)
    except BaseException:
        os.close(folder.descriptor)
        raise
    return folder, "."


def _entered(name: str, before: _Folder | None, where: str, of_anybody: bool) -> _Folder:
    """A folder, opened from the one before it, which is closed; as it is where this raises."""
    base = None if before is None or name == "/" else before.descriptor
    descriptor = os.open(name, _PART | os.O_DIRECTORY, dir_fd=base)
    try:
        _check_folder(descriptor, where, of_anybody)
    except BaseException:
        os.close(descriptor)
        raise
    if before is not None:
        os.close(before.descriptor)
    return _Folder(descriptor, where)


def _check_link(facts: os.stat_result, where: str, links: int) -> None:
    if links > LINKS_MAX:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), where)
    if facts.st_uid not in (0, os.geteuid()):
        raise SecretFileError(
            f"{where} is a link of user {user_name(facts.st_uid)}, who can lead it elsewhere",
            "name the file that it is to lead to",
        )


def _check_folder(descriptor: int, where: str, of_anybody: bool) -> None:
    facts = os.fstat(descriptor)
    own = of_anybody or facts.st_uid in (0, os.geteuid())
    if not own and not _is_outside(facts.st_uid):
        here = user_name(os.geteuid())
        theirs = " or ".join(dict.fromkeys((here, user_name(0))))
        raise SecretFileError(
            f"folder {where} belongs to user {user_name(facts.st_uid)}, who can exchange what lies in it",
            f"keep the secret in a folder of {theirs}, or chown {here} {where}",
        )
    writers = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or facts.st_mode & stat.S_ISVTX:
        return
    if writers == stat.S_IWGRP and own and _is_private_group(facts) and not _has_acl(descriptor):
        return
    others = "others" if writers & stat.S_IWOTH else f"group {_group_name(facts.st_gid)}"
    raise SecretFileError(
        f"folder {where} can be written to by {others} (mode {stat.S_IMODE(facts.st_mode):04o}), who can "
        "exchange what lies in it",
        f"chmod go-w {where}, and look whether what lies there is yours",
    )


def _is_outside(uid: int) -> bool:
    """Whether a user is one from outside of this user namespace, as all of these look alike."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lines = Path("/proc/self/uid_map").read_text().split()
    except (OSError, ValueError):
        return False
    return uid == overflow and lines != ["0", "0", str((1 << 32) - 1)]


def _is_private_group(facts: os.stat_result) -> bool:
    """Whether a folder's group is that of its owner, and of nobody else."""
    try:
        owner, group = pwd.getpwuid(facts.st_uid), grp.getgrgid(facts.st_gid)
    except KeyError:
        return False
    if owner.pw_gid != facts.st_gid or group.gr_name != owner.pw_name or {*group.gr_mem} - {owner.pw_name}:
        return False
    return all(each.pw_uid == facts.st_uid for each in pwd.getpwall() if each.pw_gid == facts.st_gid)


def _has_acl(descriptor: int) -> bool:
    """Whether an access control list says more than the mode: the group's bits are its mask then."""
    try:
        return bool(os.getxattr(f"/proc/self/fd/{descriptor}", _ACL))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
