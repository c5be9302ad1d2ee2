"""The settings: where the file is, what each key means, and which value counts.

Rules
- Order: flags (`overrides`), environment, file, default.
- Only the sections a program uses are checked; a mistake there is a `ConfigError` that names key, file and line. An
  unknown key or section is a warning that names the closest known one.
- A file that holds a secret and that others can read is refused.
- Cheap to import and to run: the command pays at every start. The parsed file is kept as JSON in the cache directory
  and is used while path, times, size, inode and program version are the same; else TOML is parsed.

"""
# pathlib (5 ms) and contextlib are left out for the command's start-up time:
# ruff: noqa: PTH100, PTH102, PTH108, PTH111, PTH112, PTH117, PTH120, PTH123

from __future__ import annotations

import os
import stat
import sys

from kueue import __version__, units
from kueue.errors import ConfigError, UserError
from kueue.settings import (
    GLOBAL_RESOURCES,
    SECRET_GOOD,
    SECRET_MIN,
    SECTIONS,
    ClientSettings,
    CommonSettings,
    MetricsSettings,
    RestartWorkers,
    Section,
    ServerSettings,
    Setting,
    WorkerSettings,
    guessing_time,
    template,
    toml,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

PATH_VARIABLE = "KUEUE_CONFIG"
OVERRIDES = {"KUEUE_STATE_DIR": "common_settings.state_dir", "KUEUE_LOG_LEVEL": "common_settings.log_level"}
"""Environment variables that win over the file, besides `PATH_VARIABLE`, which names the file."""


class Config:
    """All settings as one program sees them; sections it did not ask for have their defaults where they are broken."""

    def __init__(
        self,
        path: str = "",
        *,
        exists: bool = False,
        common: CommonSettings | None = None,
        server: ServerSettings | None = None,
        worker: WorkerSettings | None = None,
        client: ClientSettings | None = None,
        metrics: MetricsSettings | None = None,
        restart_workers: RestartWorkers | None = None,
        global_resources: Mapping[str, int] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.exists = exists
        """False: there was no file, all is default and there is no secret."""
        self.common = common or CommonSettings()
        self.server = server or ServerSettings()
        self.worker = worker or WorkerSettings()
        self.client = client or ClientSettings()
        self.metrics = metrics or MetricsSettings()
        self.restart_workers = restart_workers
        """None: the section is not there."""
        self.global_resources = global_resources
        """Name to total; None: the section is not there."""
        self.warnings = warnings
        """Sentences for stderr or the log."""


def default_path(environ: Mapping[str, str] = os.environ) -> str:
    """``$KUEUE_CONFIG``, else ``$XDG_CONFIG_HOME/kueue/config.toml`` (``~/.config/kueue/config.toml``)."""
    if environ.get(PATH_VARIABLE):
        return environ[PATH_VARIABLE]
    base = environ.get("XDG_CONFIG_HOME", "")
    # The XDG base directory specification: a relative path is to be ignored.
    return f"{base if os.path.isabs(base) else os.path.expanduser('~/.config')}/kueue/config.toml"


def load(
    path: str | None = None,
    sections: Iterable[str] = tuple(SECTIONS),
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    cache_dir: str | None = None,
) -> Config:
    """The settings that count.

    `path`: None is `default_path`. `sections`: those the program uses (``common_settings`` always is).
    `overrides`: values of flags by ``section.key``. `cache_dir`: a private local directory for the parsed form.
    Raises `ConfigError`; a missing file is none (see `Config.exists`).
    """
    path = os.path.abspath(os.path.expanduser(path or default_path(environ)))
    file = _File(path, cache_dir)
    wanted = {CommonSettings.name, *sections}
    forced: dict[str, Any] = {key: environ[name] for name, key in OVERRIDES.items() if environ.get(name)}
    origins = {key: name for name, key in OVERRIDES.items() if key in forced}
    for key, value in (overrides or {}).items():
        forced[key] = value
        origins.pop(key, None)
    warnings = _unknown_sections(file)
    built: dict[str, Any] = {
        name: _build(section, file, wanted, warnings, forced=forced, origins=origins)
        for name, section in SECTIONS.items()
    }
    config = Config(
        path,
        exists=file.exists,
        **{name.removesuffix("_settings"): section for name, section in built.items()},
        global_resources=_global_resources(file, strict=GLOBAL_RESOURCES in wanted or ServerSettings.name in wanted),
    )
    config.worker = _fitting_interval(config, file, wanted)
    _check_secrets(config, file, warnings)
    config.warnings = tuple(warnings)
    return config


def tables(path: str) -> dict[str, Any]:
    """What stands in the file, unjudged; empty if there is none. Raises `ConfigError`."""
    return _File(path, None).data


class _File:
    """The parsed file, and where in it a key stands."""

    def __init__(self, path: str, cache_dir: str | None) -> None:
        self.path = path
        self.exists = True
        self.mode = 0
        try:
            # A FIFO without a writer would hold an ordinary open for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self.exists = False
            self.data: dict[str, Any] = {}
            return
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"Failed to load config: {path} is not a file.")
            self.mode = stat.S_IMODE(found.st_mode)
            self.data = _parsed(path, descriptor, found, cache_dir)
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            os.close(descriptor)

    def line(self, section: str, key: str = "") -> int:
        """The line of a key (or of the section's head), 0 if it cannot be found."""
        here = ""
        for number, line in enumerate(_lines(self.path), 1):
            text = line.strip()
            if text.startswith("["):
                here = text.strip("[]# \t").partition("]")[0].strip(" \t\"'")
                if here == section and not key:
                    return number
                continue
            name = text.partition("=")[0].strip(" \t\"'") if "=" in text else ""
            if name == key and key and here == section:
                return number
            if not here and name in {section, f"{section}.{key}"}:
                return number
        return 0

    def wrong(self, section: str, key: str, what: str, hint: str = "") -> ConfigError:
        line = self.line(section, key) if self.exists else 0
        where = f"{self.path}, line {line}" if line else self.path
        return ConfigError(f"Failed to load config: {where}: {section}{'.' if key else ''}{key} {what}.", hint=hint)


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"Failed to load config: {path} cannot be read: {error.strerror}.")


def _lines(path: str) -> list[str]:
    """None at all if the file is gone since it was parsed; its mistake is told all the same."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except OSError:
        return []


def _parsed(path: str, descriptor: int, found: os.stat_result, cache_dir: str | None) -> dict[str, Any]:
    """The tables of the file, from the cache if it is of just this file."""
    key = [path, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev, __version__]
    cached = f"{cache_dir}/config-{_checksum(path)}.json" if cache_dir else ""
    if cached:
        import json  # noqa: PLC0415  every caller with a cache speaks JSON to the server anyway

        try:
            with open(cached, encoding="utf-8") as file:
                entry = json.load(file)
            if entry["key"] == key:
                return dict(entry["data"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none yet, or half of one: the file itself decides
    data = _parse(path, os.read(descriptor, 2**20 + 1))
    if cached:
        _keep(cached, {"key": key, "data": data}, found)
    return data


def _parse(path: str, body: bytes) -> dict[str, Any]:
    if len(body) > 2**20:
        raise ConfigError(f"Failed to load config: {path} is larger than 1 MB; that is no configuration.")
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415  30 ms that the cache saves
    else:
        import tomli as tomllib  # noqa: PLC0415  as above
    try:
        return tomllib.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise ConfigError(f"Failed to load config: {path}, line {line}: not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"Failed to load config: {path}: {error}.", hint='Texts stand in quotes: server_name = "ralab01".'
        ) from error
    except RecursionError as error:
        raise ConfigError(f"Failed to load config: {path}: nested too deeply.") from error


def _keep(cached: str, entry: dict[str, Any], found: os.stat_result) -> None:
    """Put the parsed form beside the state; a failure costs only time, so nobody hears of it."""
    import json  # noqa: PLC0415  see `_parsed`
    import time  # noqa: PLC0415  built in

    from kueue import whole_file  # noqa: PLC0415  as above

    # A file changed twice within one tick of the file system's clock would look unchanged.
    if abs(time.time() - found.st_mtime) < 2:
        return
    try:
        whole_file.write(cached, json.dumps(entry).encode())
    except (OSError, TypeError, ValueError):
        return


def _checksum(text: str) -> str:
    from binascii import crc32  # noqa: PLC0415  built in

    return f"{crc32(text.encode('utf-8', 'surrogateescape')):08x}"


def _unknown_sections(file: _File) -> list[str]:
    known = [*SECTIONS, GLOBAL_RESOURCES]
    return [
        _unknown(file, f"section [{name}]" if isinstance(value, dict) else f"key {name}", name, "", known)
        for name, value in file.data.items()
        if name not in known
    ]


def _unknown(file: _File, what: str, section: str, key: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415  a file without mistakes need not pay for it

    close = get_close_matches(key or section, list(known), n=1)
    line = file.line(section, key)
    where = f"{file.path}, line {line}" if line else file.path
    return f"{where}: unknown {what}{f'; did you mean {close[0]}?' if close else ' is ignored.'}"


def _build(
    section: type[Section],
    file: _File,
    wanted: set[str],
    warnings: list[str],
    *,
    forced: Mapping[str, Any],
    origins: Mapping[str, str],
) -> Section | None:
    """The section with all its values; None if an optional one is not there."""
    strict = section.name in wanted
    table = file.data.get(section.name)
    if table is None and section is RestartWorkers:
        return None
    if table is not None and not isinstance(table, dict):
        if strict:
            raise file.wrong(section.name, "", "must be a section, not a value")
        table = None
    values = {}
    for key, value in (table or {}).items():
        known = section.settings.get(key)
        if known is None:
            if strict:
                warnings.append(_unknown(file, f"key {section.name}.{key}", section.name, key, section.settings))
            continue
        if f"{section.name}.{key}" in forced:
            continue
        try:
            values[key] = _valid(section, key, known, value)
        except ValueError as error:
            if strict:
                raise file.wrong(section.name, key, str(error)) from None
    for key, known in section.settings.items():
        name = f"{section.name}.{key}"
        if name in forced:
            try:
                values[key] = _valid(section, key, known, forced[name])
            except ValueError as error:
                raise ConfigError(f"{origins.get(name, name)} {error}.") from None
        elif known.required and strict and not values.get(key):
            raise file.wrong(section.name, "", f"needs the key {key}")
    return section(**values)


def _valid(section: type[Section], key: str, known: Setting, value: Any) -> Any:
    if "secret" in key and not isinstance(value, str):
        raise ValueError("must be a string")
    value = known.checked(value)
    if section is WorkerSettings and key == "resources":
        try:
            units.parse_resources(value.replace(",", " ").split())
        except UserError as error:
            raise ValueError(f'must be like "gpu=4 fpga=1": {error}') from None
    if section is MetricsSettings:
        value = _metrics_place(key, value.strip())
    if section is CommonSettings and key == "server_name":
        value = value.strip()
        if not value.isprintable() or len(value.split()) != 1:
            raise ValueError("must be one host name or address")
    return value


def _metrics_place(key: str, value: str) -> str:
    if key == "server_textfile":
        value = os.path.expanduser(value)
        if value and not (os.path.isabs(value) and value.endswith(".prom")):
            raise ValueError("must be an absolute path that ends in .prom: node_exporter looks at no other files")
    elif value:
        try:
            units.parse_bind(value)
        except UserError as error:
            raise ValueError(f'must be like "127.0.0.1:11237", "[::1]:11237" or ":11237", not {toml(value)}') from error
    return value


def _global_resources(file: _File, *, strict: bool) -> dict[str, int] | None:
    table = file.data.get(GLOBAL_RESOURCES)
    if table is None:
        return None
    if not isinstance(table, dict):
        if strict:
            raise file.wrong(GLOBAL_RESOURCES, "", "must be a section, not a value")
        return None
    total = Setting(int, 0, "", least=0, most=2**63 - 1)
    resources = {}
    for name, value in table.items():
        if not units.is_resource_name(name):
            if strict:
                raise file.wrong(GLOBAL_RESOURCES, name, "is no name: letters, digits and _ . + : @ / - are allowed")
            continue
        try:
            resources[name] = total.checked(value)
        except ValueError as error:
            if strict:
                raise file.wrong(GLOBAL_RESOURCES, name, str(error)) from None
    return resources


def _fitting_interval(config: Config, file: _File, wanted: set[str]) -> WorkerSettings:
    """The worker's settings with a report interval below the worker time-out."""
    key = "system_update_interval_seconds"
    interval, limit = config.worker.system_update_interval_seconds, config.server.worker_timeout_seconds
    if interval < limit:
        return config.worker
    table = file.data.get(WorkerSettings.name)
    if isinstance(table, dict) and key in table and wanted & {WorkerSettings.name, ServerSettings.name}:
        raise file.wrong(
            WorkerSettings.name,
            key,
            f"must be below server_settings.worker_timeout_seconds ({limit}), not {interval}",
            hint=f"Set it to {max(1, limit // 5)}, or remove it.",
        )
    # Nobody chose the default; a shorter time-out must not break a file that does not even name the interval.
    return WorkerSettings(**{**vars(config.worker), key: max(1, limit // 5)})


def _check_secrets(config: Config, file: _File, warnings: list[str]) -> None:
    common = config.common
    if not file.exists:
        return
    if (common.shared_secret or common.shared_secret_previous) and file.mode & 0o066:
        raise ConfigError(
            f"{file.path} holds the shared secret and other users can read or change it (mode {file.mode:04o}).",
            hint=f"chmod 600 {file.path}",
        )
    if not common.shared_secret:
        raise ConfigError(
            f"{file.path}: common_settings.shared_secret is missing or empty.",
            hint="Copy the file of the server, or set the same secret that stands there.",
        )
    for key in ("shared_secret", "shared_secret_previous"):
        secret = getattr(common, key)
        if secret and len(secret) < SECRET_MIN:
            raise file.wrong(
                CommonSettings.name,
                key,
                f"has only {len(secret)} characters; at least {SECRET_MIN} are needed",
                hint="Remove the file to get a new one with a random secret, or put 64 random characters.",
            )
        if secret and len(secret) < SECRET_GOOD:
            warnings.append(f"{CommonSettings.name}.{key} {guessing_time(secret)}")


def write_template(path: str) -> bool:
    """Make a new settings file (0600, parents 0700) with a random secret; False if there is one already.

    The file appears whole or not at all: two programs that start at once end up with one secret.
    """
    import secrets  # noqa: PLC0415  once in the life of a lab
    import string  # noqa: PLC0415  as above

    path = os.path.abspath(os.path.expanduser(path))
    text = template("".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(64)))
    draft = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        _make_private(os.path.dirname(path))
        if os.path.lexists(path):
            return False
        _write_new(draft, text)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:
            _write_new(path, text)  # no hard links here (FAT, some FUSE): almost as good
        finally:
            os.unlink(draft)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"The settings file {path} cannot be made: {error.strerror}.") from error
    return True


def _write_new(path: str, text: str) -> None:
    """Whatever it raises, no part of the file is left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        os.unlink(path)
        raise


def _make_private(directory: str) -> None:
    """Make the directory and its missing parents, 0700 each; those that are there stay as they are."""
    if os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(20, f"{directory} is not a directory") from None


def first_start(path: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Make the template if there is no file; returns a remark for stderr, empty if there was one."""
    path = os.path.abspath(os.path.expanduser(path or default_path(environ)))
    if os.path.lexists(path) or not write_template(path):
        return ""
    return f"A new settings file with a random secret was made: {path}. Copy it to the other machines."


__all__ = [
    "SECTIONS",
    "ClientSettings",
    "CommonSettings",
    "Config",
    "MetricsSettings",
    "RestartWorkers",
    "ServerSettings",
    "WorkerSettings",
    "default_path",
    "first_start",
    "load",
    "write_template",
]
