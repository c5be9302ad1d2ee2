"""``kueue_install systemd``: the units of this installation for this host, and what keeps them running."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from kueue import config, places
from kueue.config import Config
from kueue.errors import KueueError
from kueue.transport import is_this_host
from kueue_ops import assets, installation, systemd, user_services
from kueue_ops.steps import Steps
from kueue_ops.systemd import PARTS, Part
from kueue_ops.user_services import UserServices


def act(options: argparse.Namespace, steps: Steps) -> None:
    """Install or take away. Raises `KueueError` when nothing can be done at all."""
    services = user_services.find()
    if services.remark:
        steps.remark(services.remark)
    looked_at = user_services.home()
    if looked_at and os.path.realpath(looked_at) != os.path.realpath(Path.home()):
        steps.remark(
            f"HOME is {Path.home()} here, but your service manager looks into {looked_at} alone (after su or sudo?)."
        )
    if options.uninstall:
        _uninstall(options, steps, services)
    else:
        _install(options, steps, services)


class _Site:
    """The unit of one part in this home, and this host's place in it."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part = part
        self.unit = folder / part.unit
        self.dropins = folder / f"{part.unit}.d"
        self.host = os.uname().nodename
        self.own = self.dropins / systemd.host_file(self.host)
        self.link = folder / "default.target.wants" / part.unit

    def others(self) -> list[str]:
        """Further hosts that the unit was installed for."""
        try:
            found = [systemd.host_of(path.name) for path in self.dropins.iterdir()]
        except OSError:
            return []
        return sorted(name for name in found if name and name != self.host)


def _folder() -> Path:
    """Where a user's own units lie (systemd.unit(5), unit file load path)."""
    # XDG_CONFIG_HOME of a shell is not known to the service manager.
    return Path.home() / ".config" / "systemd" / "user"


# --- install ----------------------------------------------------------------------------------------------------------


def _install(options: argparse.Namespace, steps: Steps, services: UserServices) -> None:
    settings, path = _settings(options.config)
    sites = [_Site(part, _folder()) for part in _parts(options.parts, settings, path)]
    if settings.exists and settings.restart_workers is None and "restart-workers" in options.parts:
        raise KueueError(
            f"{path} has no section [restart_workers], so kueue_restart_workers does not know its hosts.",
            hint="Write ssh_user and hostnames there first.",
        )
    if not settings.exists:
        steps.remark(
            f"There is no settings file {path} yet. The worker waits for it; the others do not start without. "
            "Copy that of the lab to this place (chmod 600), or start kueue_server once in a terminal to get a new one."
        )
    for name in ("KUEUE_STATE_DIR", "XDG_STATE_HOME"):
        if os.environ.get(name):
            steps.remark(
                f"{name} is set here, but services do not see it: write common_settings.state_dir into {path}."
            )
    written = [site for site in sites if _write(site, options, steps, services, path)]
    names = [site.part.unit for site in written]
    problem = services.problem()
    if problem:
        steps.fail(problem)
        steps.remark("Then type the same again: the files are there, but nothing is enabled or started yet.")
    elif names:
        is_known = steps.systemctl(services, "daemon-reload")
        if is_known and options.enable:
            steps.systemctl(services, "enable", *names)
        if is_known and options.start:
            _start(written, settings, steps, services)
        elif is_known:
            print(f"To start now: systemctl --user restart {shlex.join(names)}")
    _tell_of_linger(steps, services)


def _settings(path: str | None) -> tuple[Config, str]:
    """The settings and their absolute path. Raises `ConfigError` for those that no program could start with."""
    settings = config.load(path, ("server_settings", "worker_settings"))
    return settings, settings.path


def _parts(named: list[str], settings: Config, path: str) -> list[Part]:
    if named:
        return [PARTS[name] for name in dict.fromkeys(named)]
    if not settings.exists:
        raise KueueError(
            f"There is no settings file {path}, so it is not known what shall run on this machine.",
            hint="Copy that of the lab to this place, start kueue_server once in a terminal to get a new one, or say "
            "which: kueue_install systemd worker",
        )
    return [PARTS["server"], PARTS["worker"]] if is_this_host(settings.common.server_name) else [PARTS["worker"]]


def _write(site: _Site, options: argparse.Namespace, steps: Steps, services: UserServices, path: str) -> bool:
    """Whether unit and drop-in are as they must be. Raises `KueueError` if another host's would break."""
    part, others = site.part, site.others()
    if part.one_host and others and not options.force:
        raise KueueError(
            f"In this home {part.unit} is installed for {_joined(others)}; one host is enough, and of servers "
            "two would be two queues.",
            hint=f"Take it away there first (kueue_install systemd {part.name} --uninstall), or move it here: --force",
        )
    command = _command(site, others, options, steps)
    text = (assets.folder("systemd-user") / part.unit).read_text(encoding="utf-8")
    usual = str(Path.home() / ".config" / "kueue" / "config.toml")
    text = systemd.unit(text, command, "" if path == usual else path, services.version)
    is_written = steps.write(site.unit, text)
    is_written = steps.write(site.own, systemd.host(site.host)) and is_written
    if part.one_host:
        for other in others:
            steps.remove(site.dropins / systemd.host_file(other))
    return is_written


def _command(site: _Site, others: list[str], options: argparse.Namespace, steps: Steps) -> systemd.Command:
    """How the unit starts its program: as this installation does, unless that would be wrong for other hosts."""
    command = installation.command(site.part)
    try:
        present = systemd.started(site.unit.read_text(encoding="utf-8"))
    except OSError:
        return command
    here = command.words[0]
    if not others or site.part.one_host or present == here or options.force:
        return command
    if Path(here).is_relative_to(Path.home()):
        steps.remark(f"{site.part.unit} now starts {here}, also on {_joined(others)}: they see this home, too.")
        return command
    raise KueueError(
        f"{_joined(others)} and this machine share the unit {site.unit}, which starts {present}; this "
        f"installation has {here}.",
        hint="Install kueue at the same place on all of them, best in the home; --force takes this one's path for all.",
    )


def _start(sites: list[_Site], settings: Config, steps: Steps, services: UserServices) -> None:
    for site in sites:
        unit = site.part.unit
        runs = not services.systemctl("is-active", "--quiet", unit)
        # A dry run makes no state directory either.
        lock = "" if runs or steps.is_dry else _lock(site.part, settings)
        if lock and places.is_locked(lock):
            pid = places.holder(lock)
            steps.fail(
                f"A {site.part.program} runs already outside of systemd{f' (pid {pid})' if pid else ''}. "
                f"Stop that one (kueue down, or Ctrl-C in its screen), then type: systemctl --user restart {unit}"
            )
        elif not steps.systemctl(services, "restart", unit):
            steps.remark(f"What it said: journalctl --user -n 20 -u {unit}")
        elif not steps.is_dry and services.systemctl("is-active", "--quiet", unit):
            steps.fail(f"{unit} was not started: a condition of the unit does not hold. systemctl --user status {unit}")


def _lock(part: Part, settings: Config) -> str:
    """What the running program holds; empty: nothing, or not known."""
    if not settings.exists or part.name not in {"server", "worker"}:
        return ""
    state = places.find(settings.common.state_dir)
    if part.name == "server":
        return state.server_lock
    return f"{state.worker(settings.worker.worker_name or os.uname().nodename.partition('.')[0])}/lock"


def _tell_of_linger(steps: Steps, services: UserServices) -> None:
    if not services.lingers():
        steps.remark(
            "Lingering is off: the services and all jobs end when you log out, and do not start with the machine. "
            f"Type: {user_services.linger_command()}   (if that is refused, an administrator has to)"
        )


# --- uninstall --------------------------------------------------------------------------------------------------------


def _uninstall(options: argparse.Namespace, steps: Steps, services: UserServices) -> None:
    problem = services.problem()
    if problem:
        steps.remark(problem)
    parts = [PARTS[name] for name in dict.fromkeys(options.parts)] or list(PARTS.values())
    found = False
    for site in (_Site(part, _folder()) for part in parts):
        # A unit that somebody wrote by hand is not even stopped.
        is_left = steps.record.state(site.unit) == "ours" or (options.force and site.unit.exists())
        if site.own.exists() or (is_left and not site.others()):
            found = True
            _take_away(site, steps, services, can_ask=not problem)
        elif site.others():
            steps.remark(f"{site.part.unit} stays: it is installed for {_joined(site.others())}, not for here.")
            found = True
    if not found:
        steps.remark("No units of kueue are installed here.")
    elif not problem:
        steps.systemctl(services, "daemon-reload")


def _take_away(site: _Site, steps: Steps, services: UserServices, *, can_ask: bool) -> None:
    unit, others = site.part.unit, site.others()
    is_last = not others
    if can_ask and is_last:
        # Of a unit that the manager does not know there is nothing to disable.
        if not services.systemctl("cat", "--", unit):
            steps.systemctl(services, "disable", "--now", unit)
    elif can_ask:
        # What is enabled is enabled for all hosts of the home.
        steps.systemctl(services, "stop", unit)
    elif is_last and site.link.is_symlink():
        if not steps.is_dry:
            site.link.unlink(missing_ok=True)
        steps.say(f"removed {site.link}", f"remove {site.link}")
    if site.part.name == "worker":
        steps.remark("Jobs that run here go on under their runner; the next worker takes them up again.")
    steps.remove(site.own)
    if is_last:
        steps.remove(site.unit)
        steps.remove_folder(site.dropins)
    else:
        steps.remark(f"{unit} stays for {_joined(others)}.")


def _joined(words: list[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
