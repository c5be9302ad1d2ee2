"""Where local state lives, and the locks that say who owns it.

Rules
- State, locks and sockets lie on a *local* file system: ``KUEUE_STATE_DIR`` or the setting, else
  ``$XDG_STATE_HOME/kueue`` (``~/.local/state/kueue``), else ``/var/tmp/kueue-<uid>``. A network file system is used
  only when it was named explicitly.
- ``XDG_RUNTIME_DIR`` is not used: it vanishes at logout and differs between ssh, cron and systemd.
- Every directory is 0700 and ours. A pid written in a file decides nothing; a held lock does.
- Paths are `str`: the command pays for this module at every start, and pathlib takes 5 ms to import.
"""
# pathlib (5 ms) and contextlib are left out for the command's start-up time, see above:
# ruff: noqa: PTH100, PTH101, PTH102, PTH109, PTH111, PTH116, PTH117, PTH120, PTH123, SIM105

from __future__ import annotations

import fcntl
import os
import stat
import struct
from errno import EACCES, EAGAIN, ELOOP, ENXIO

from kueue.errors import ConfigError, KueueError, StorageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

ENVIRONMENT = "KUEUE_STATE_DIR"

STATE_FILE = "queue.sqlite"
"""The server's store, in `Places.server`."""
CUT_SUFFIX = ".cut"
"""Behind its name: the note that a part of it was lost (`kueue.storage.cut`)."""

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` with 64-bit offsets: type, whence, start, length, pid (0 for open-file-description locks)."""
_TRIES = 5
"""Where files change their number while they are open, there is no more to be had than the lock."""

_NETWORK_TYPES = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "auristorfs", "coda", "ncp", "ncpfs", "autofs"),
        *("lustre", "gpfs", "beegfs", "fhgfs", "ceph", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "ocfs2"),
        *("gfs", "gfs2", "9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "davfs", "dfs", "quobyte", "moosefs"),
    }
)


class Places:
    """The directories below one state root. Reading an attribute makes the directory (0700) if it is not there."""

    def __init__(self, root: str, *, is_network: bool = False, remark: str = "") -> None:
        self.root = root
        self.is_network = is_network
        """The root is on a network file system (it was named explicitly): no WAL, locks may lie."""
        self.remark = remark
        """A warning for the log of a long-running program; empty if there is none."""

    def __repr__(self) -> str:
        return f"Places({self.root!r}, is_network={self.is_network})"

    @property
    def server(self) -> str:
        """State, lock and local socket of the server."""
        return own_directory(f"{self.root}/server")

    @property
    def cache(self) -> str:
        """What can be made again at any time: the parsed configuration and the key derived from the secret."""
        return own_directory(f"{self.root}/cache")

    @property
    def server_lock(self) -> str:
        """Held by the running server; on this host a runner takes "nobody holds it" for "there is no server"."""
        return f"{self.server}/lock"

    @property
    def cut_note(self) -> str:
        """There if a file of the state was cut, until nothing is lost or the next start has dealt with it."""
        return f"{self.server}/{STATE_FILE}{CUT_SUFFIX}"

    def worker(self, name: str) -> str:
        """State of the worker of this name: identity, lock, spool, runners."""
        own_directory(f"{self.root}/workers")
        return own_directory(f"{self.root}/workers/{file_name(name)}")

    def server_socket(self, port: int, fingerprint: str) -> str:
        """Path of the server's local socket. It may be longer than a socket address: see `socket_address`."""
        return f"{self.server}/{port}-{fingerprint}.sock"

    def keep(self) -> int:
        """A descriptor with a shared lock on the root; while it is open systemd-tmpfiles leaves the root alone.

        Raises `StorageError` when the root cannot be opened.
        """
        try:
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(self.root, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            # A cleaner holds it at this moment, or the file system knows no locks: then nothing can be promised.
            pass
        return descriptor


def find(setting: str = "", environ: Mapping[str, str] = os.environ) -> Places:
    """The state root of this user on this machine; made if it is not there.

    `setting`: ``common_settings.state_dir``; empty if there is none. Raises `KueueError` when no place can be used.
    """
    named = environ.get(ENVIRONMENT) or setting
    if named:
        return _named(named, ENVIRONMENT if environ.get(ENVIRONMENT) else "common_settings.state_dir")
    base = environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification: a relative path is to be ignored.
    home = f"{base if os.path.isabs(base) else os.path.expanduser('~/.local/state')}/kueue"
    if os.path.isabs(home) and not is_network(home):
        try:
            return Places(own_directory(home))
        except KueueError as error:
            trouble = str(error).rstrip(".")
    else:
        trouble = f"{home} is on a network file system"
    substitute = f"/var/tmp/kueue-{os.getuid()}"  # noqa: S108  sticky directory: ownership is checked below
    try:
        return Places(own_directory(substitute))
    except KueueError as error:
        raise KueueError(
            f"No place for local state: {trouble}; {error}",
            hint=f"Name a directory on a local disk in {ENVIRONMENT} or in common_settings.state_dir.",
        ) from error


def _named(named: str, origin: str) -> Places:
    root = os.path.abspath(os.path.expanduser(named))
    try:
        # The user's own choice, which may be an existing directory: what lies below it is private all the same.
        _own(root, shared_read=True)
    except OSError as error:
        raise ConfigError(f"{origin} = {root} cannot be used: {error.strerror}.") from error
    if not is_network(root):
        return Places(root)
    return Places(
        root,
        is_network=True,
        remark=f"The state directory {root} is on a network file system ({file_system(root)}): "
        "slower, and only safe while locks work there. A local disk is better.",
    )


def own_directory(path: str) -> str:
    """`path`, which is now a directory of ours with mode 0700.

    Missing parents are made with 0700 too; those that are there stay as they are. Raises `KueueError` if it belongs to
    somebody else or cannot be made.
    """
    try:
        _own(path)
    except OSError as error:
        raise _unusable(path, error) from error
    return path


def _own(path: str, *, shared_read: bool = False) -> None:
    """As `own_directory`; with `shared_read` a directory that is there keeps its mode, and is refused if others can
    write into it. Raises `OSError`, too.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        _make(path)
        found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        # A link of our own may point to a larger disk; one that another user planted must not lead us anywhere.
        if found.st_uid != os.getuid():
            raise KueueError(f"{path} is a symbolic link of another user.")
        found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise KueueError(f"{path} is not a directory.")
    if found.st_uid != os.getuid():
        raise KueueError(f"{path} belongs to another user (uid {found.st_uid}).")
    if shared_read and found.st_mode & 0o022:
        raise KueueError(f"Others can write into {path}.", hint=f"chmod go-w {path}, or name another directory.")
    if not shared_read and found.st_mode & 0o077:
        os.chmod(path, 0o700)


def _unusable(path: str, error: OSError) -> StorageError:
    return StorageError(f"The directory {path} cannot be used: {error.strerror}.", hint="`kueue doctor` looks at it.")


def typed(path: str) -> str:
    """The absolute path that a person means by `path`: ``~`` is a home, unless there is no such user.

    Links and ``..`` are the kernel's. In a directory that was removed a relative one stays relative: it leads nowhere.
    """
    path = os.path.expanduser(path)
    if os.path.isabs(path):
        return path
    try:
        return f"{os.getcwd()}/{path}"
    except FileNotFoundError:
        return path


def _make(path: str) -> None:
    """Make the directory and its missing parents, 0700 each whatever the umask."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass  # another program of ours was faster; what it made is checked by the caller
    except FileNotFoundError:
        _make(os.path.dirname(path))
        try:
            # Once: below /proc a directory is missing also when its parent is there.
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # as above


def file_name(name: str) -> str:
    """`name` as one file name: letters, digits, ``_ -`` and inner dots stay, other bytes become ``%XX``; reversible."""
    encoded = "".join(
        chr(byte) if byte < 128 and (chr(byte).isalnum() or chr(byte) in "_-.") else f"%{byte:02X}"
        for byte in name.encode("utf-8", "surrogateescape")
    )
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if not 0 < len(encoded) <= 200:  # a file name may have 255 bytes; suffixes need room
        raise ConfigError(f"Not usable as a name: '{name[:80]}'.", hint="Take 1 to 200 letters, digits, '-' or '_'.")
    return encoded


def socket_address(path: str) -> tuple[str, int]:
    """The address by which a Unix socket at `path` is bound or connected, and a descriptor to close after that (or -1).

    An address holds 107 bytes (unix(7)); a longer path goes through an open descriptor of its directory.
    """
    if len(os.fsencode(path)) <= 107:
        return path, -1
    directory, _, name = path.rpartition("/")
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{descriptor}/{name}", descriptor


def file_system(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that holds `path` (or would, if it is not there), as ``nfs4``; empty if unknown.

    From the mount table (proc_pid_mountinfo(5)), because statfs has no name for most FUSE file systems and hangs on
    a dead server.
    """
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as table:
            lines = table.readlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    longest, kind = -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 10 or "-" not in fields:
            continue
        point = _unescape(fields[4]) if "\\" in fields[4] else fields[4]
        # Of two mounts on one point the later hides the earlier.
        if len(point) >= longest and (real == point or real.startswith(f"{point.rstrip('/')}/")):
            longest, kind = len(point), fields[fields.index("-", 6) + 1]
    return kind


def is_network(path: str, mountinfo: str = "/proc/self/mountinfo") -> bool:
    """Is `path` held by another machine, so that locks and memory maps cannot be trusted? FUSE counts unless known."""
    return is_network_type(file_system(path, mountinfo))


def is_network_type(kind: str) -> bool:
    """As `is_network`, of a type of file system as the mount table names it."""
    if kind.startswith("fuse"):
        # Of FUSE the local ones are few and the remote ones without number (sshfs, s3fs, rclone, gcsfuse ...).
        return kind not in {"fuseblk", "fuse.ext2", "fuse.ntfs-3g", "fuse.fuse-overlayfs", "fusectl", "fuse.lxcfs"}
    return kind in _NETWORK_TYPES


def _unescape(field: str) -> str:
    """A mount point with the octal escapes of the mount table (blank, tab, newline, backslash) undone."""
    first, *rest = field.split("\\")
    return first + "".join(chr(int(piece[:3], 8)) + piece[3:] for piece in rest)


class Lock:
    """An exclusive lock that is held until `release`, the end of the ``with`` block or the end of the process."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def is_in_place(self) -> bool | None:
        """Is the file at the path the one that is locked? None: there is no file. One stat.

        One that cannot be looked at (a failing disk) counts as in place: nobody else can take it either.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return True
        return os.path.samestat(found, os.fstat(self.descriptor))

    def changed_ns(self) -> int:
        """When the locked file was last changed in any way, also by a rename: ``st_ctime`` (inode(7)), nanoseconds."""
        return os.fstat(self.descriptor).st_ctime_ns

    def take_back(self, what: str) -> None:
        """Hold the file that is at the path now, made if there is none, instead of the one that is there no more.

        `what` and errors as in `lock_exclusive`; nothing has changed then.
        """
        fresh = lock_exclusive(self.path, what)
        self.release()
        self.descriptor = fresh.descriptor

    def release(self) -> None:
        """Give the lock up; the file stays, so that nobody ever locks a file that is gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Lock:  # noqa: PYI034  Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class KeptDirectory:
    """A directory that is kept open: no other one is given its number meanwhile."""

    def __init__(self, path: str) -> None:
        """Raises `OSError`."""
        self._path = path
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_in_place(self) -> bool:
        """Does its path still lead to it?"""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)


def lock_exclusive(path: str, what: str = "This program") -> Lock:
    """Take the lock file (made 0600), or raise `KueueError`: "`what` is running already (pid 17)".

    It is an open-file-description lock (fcntl_locking(2)): it belongs to the descriptor, ends with its last copy,
    and others can look at it without touching it (`is_locked`). Raises `StorageError` where it cannot be made.
    """
    lock = _lock_once(path, what)
    for _ in range(_TRIES):
        # A file that was removed or replaced before it was locked keeps nobody away.
        if lock.is_in_place():
            break
        lock.release()
        lock = _lock_once(path, what)
    try:
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"{os.getpid()} {_start_of(os.getpid())}\n".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same, and its holder is not known by name
    return lock


def _lock_once(path: str, what: str) -> Lock:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}.", hint=f"`kueue doctor` looks at {os.path.dirname(path)}."
        ) from error
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (EAGAIN, EACCES):
            raise KueueError(f"{path} cannot be locked: {error.strerror}.") from error
        pid = holder(path)
        raise KueueError(
            f"{what} is running already{f' (pid {pid})' if pid else ''}: {path} is locked.",
            hint="Stop that one first." if pid else "",
        ) from error
    return Lock(path, descriptor)


def nameless(who: str, path: str) -> KueueError:
    """`who` holds this lock, but its file does not say as which process (see `lock_exclusive`)."""
    return KueueError(f"{who} runs, but its pid is not known: somebody holds {path}.", hint=f"fuser {path}")


def is_locked(path: str) -> bool:
    """Does somebody hold this lock now? A missing file is not locked, nor is what no lock can be: a socket, a link that
    leads to itself. Raises `OSError`, with the path, if it cannot be looked at.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its other end
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (ELOOP, ENXIO):
            return False
        raise
    try:
        return hindrance(descriptor, fcntl.F_RDLCK) is not None
    finally:
        os.close(descriptor)


def hindrance(descriptor: int, kind: int, first: int = 0, count: int = 0) -> int | None:
    """Who keeps us from locking these bytes of an open file (`count` 0: all behind `first`): a pid, -1 for an
    open-file-description lock, which belongs to no process; None: nobody. `kind`: ``F_RDLCK`` is kept off by writers,
    ``F_WRLCK`` by all. Raises `OSError`.
    """
    question = _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
    found, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question))
    return None if found == fcntl.F_UNLCK else int(pid)


def holder(path: str) -> int | None:
    """The pid of the process that took this lock, if it holds it still; none if it is free or cannot be said."""
    if not is_locked(path):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            pid, start = (int(word) for word in os.read(descriptor, 100).split())
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    # The start time tells it from a later process of the same number, and from an earlier holder's entry.
    return pid if start and _start_of(pid) == start else None


def _start_of(pid: int) -> int:
    """The moment that process started, in clock ticks since boot (field 22 of proc_pid_stat(5)); 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _whole_file(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make names in it durable; a file system that cannot is left alone."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)
