"""Every setting of the file: kind, default, meaning, bounds; and the text of a new file made from them.

Why this way: the sections are declared with a small class of their own instead of dataclasses, which would cost every
start of the command 11 ms. `docs/settings.md` is generated from this module.
"""

from __future__ import annotations

from kueue import units
from kueue.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

LOG_LEVELS = ("trace", "debug", "info", "warn", "error")
SECRET_MIN, SECRET_GOOD = 8, 20
"""Characters below which a secret is refused, and below which it is warned about."""
U64_MAX = 2**64 - 1
UNITS_MAX = 4096
"""Of one named resource of a machine; what `model.Units` lets through."""


class Setting:
    """What is known of one key: kind, default, meaning, unit, bounds."""

    def __init__(
        self,
        kind: type,
        default: Any,
        meaning: str,
        *,
        unit: str = "",
        least: float | None = None,
        most: float | None = None,
        choices: tuple[str, ...] = (),
        in_template: bool = False,
        required: bool = False,
    ) -> None:
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.unit = unit
        self.least = least
        self.most = most
        self.choices = choices
        self.in_template = in_template
        self.required = required

    @property
    def kind_name(self) -> str:
        return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[self.kind]

    def checked(self, value: Any) -> Any:
        """`value` in its own type; raises `ValueError` with the second half of a sentence."""
        good = isinstance(value, (int, float) if self.kind is float else self.kind)
        if not good or (isinstance(value, bool) and self.kind is not bool):
            raise ValueError(f"must be {self.kind_name}, not {toml(value)}")
        if self.kind is float:
            value = float(value)
            if value - value != 0:
                raise ValueError("must be a finite number")
        if self.choices:
            value = value.strip().lower()
            if value not in self.choices:
                raise ValueError(f"must be one of {', '.join(self.choices)}, not {toml(value)}")
        if self.least is not None and value < self.least:
            raise ValueError(f"must be at least {self.least}, not {value}")
        if self.most is not None and value > self.most:
            raise ValueError(f"must be at most {self.most}, not {value}")
        if self.kind is str and any(character < " " and character not in "\t\n\r" for character in value):
            raise ValueError("must not hold control characters")
        return value


def _text(default: str, meaning: str, **more: Any) -> Any:
    return Setting(str, default, meaning, **more)


def _whole(default: int, meaning: str, least: int = 0, most: int = U64_MAX, **more: Any) -> Any:
    return Setting(int, default, meaning, least=least, most=most, **more)


def _number(default: float, meaning: str, **more: Any) -> Any:
    return Setting(float, default, meaning, **more)


def _switch(default: bool, meaning: str, **more: Any) -> Any:
    return Setting(bool, default, meaning, **more)


class Section:
    """One section of the file; keyword arguments replace defaults (unchecked: for tests and for `load`)."""

    name: ClassVar[str] = ""
    settings: ClassVar[dict[str, Setting]] = {}

    def __init_subclass__(cls) -> None:
        cls.settings = {key: value for key, value in vars(cls).items() if isinstance(value, Setting)}

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - self.settings.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        self.__dict__.update({key: values.get(key, known.default) for key, known in self.settings.items()})

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"settings do not change: {key}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # settings are compared, never looked up

    def __repr__(self) -> str:
        shown = (f"{key}={'***' if 'secret' in key and value else repr(value)}" for key, value in vars(self).items())
        return f"{type(self).__name__}({', '.join(shown)})"


class CommonSettings(Section):
    """Used by all programs."""

    name = "common_settings"

    shared_secret: str = _text(
        "",
        f"Authenticates clients and workers; must be equal everywhere. Fewer than {SECRET_MIN} characters are refused",
        in_template=True,
    )
    shared_secret_previous: str = _text("", "The secret before the last change: accepted as well while it stands here")
    server_name: str = _text(
        "localhost", "Host name or IP address by which clients and workers reach the server", in_template=True
    )
    server_port: int = _whole(11236, "Port of the server, used by all programs", most=65535, in_template=True)
    log_level: str = _text(
        "info",
        "How much is logged: trace, debug, info, warn or error. From debug on commands tell their steps on stderr",
        choices=LOG_LEVELS,
        in_template=True,
    )
    state_dir: str = _text(
        "",
        "Directory for state, locks and sockets, on a local disk; empty: $XDG_STATE_HOME/kueue if that is local, "
        "else /var/tmp/kueue-<uid>",
    )


class ServerSettings(Section):
    """Used by the server."""

    name = "server_settings"

    bind_addresses: str = _text(
        "0.0.0.0 [::]", "Blank-separated addresses to listen on; each is bound on server_port", in_template=True
    )
    maintenance_interval_seconds: int = _whole(
        60, "Period of clean-up and other chores", least=1, unit="seconds", in_template=True
    )
    worker_timeout_seconds: int = _whole(
        300,
        "Silence after which a worker counts as dead (strictly more than) and its jobs may run elsewhere",
        least=10,
        most=10**9,
        unit="seconds",
        in_template=True,
    )
    job_offer_timeout_seconds: int = _whole(
        60,
        "Age after which an unanswered offer is withdrawn (strictly more than)",
        least=1,
        most=10**9,
        unit="seconds",
        in_template=True,
    )
    job_cleanup_after_minutes: int = _whole(
        2880,
        "Age after which finished and canceled jobs are dropped (whole minutes, strictly more than)",
        most=10**9,
        unit="minutes",
        in_template=True,
    )
    global_max_parallel_jobs: int = _whole(
        100, "Most job slots in use at once, over all workers", unit="slots", in_template=True
    )


class WorkerSettings(Section):
    """Used by the workers."""

    name = "worker_settings"

    system_update_interval_seconds: int = _whole(
        60,
        "Period of the worker's report of its load; must be below worker_timeout_seconds. If it is not set it follows "
        "a shorter worker_timeout_seconds",
        least=1,
        unit="seconds",
        in_template=True,
    )
    worker_max_parallel_jobs: int = _whole(10, "Job slots of one worker", most=10**6, unit="slots", in_template=True)
    dynamic_check_free_resources: bool = _switch(True, "Count load from outside kueue as occupied", in_template=True)
    dynamic_cpu_load_scale_factor: float = _number(
        1.0,
        "Multiplies the measured load; no effect if dynamic_check_free_resources is false",
        least=0.0,
        most=1e6,
        in_template=True,
    )
    worker_name: str = _text(
        "", "Name of the worker; empty: the short host name. Another name is another worker on the same machine"
    )
    cores: int = _whole(0, "Cores to give to jobs; 0: as many as the machine has", most=10**6, unit="cores")
    ram_mb: int = _whole(0, "Memory to give to jobs; 0: as much as the machine has", most=10**12, unit="MB")
    resources: str = _text("", 'Named resources of this machine, for example "gpu=4"; blank-separated')
    job_nice: int = _whole(0, "Added to the nice value of jobs", most=19)
    output_limit_mb: int = _whole(
        1024,
        "Captured output kept per stream of a job; above it the middle is cut out, head and tail stay; 0: no limit",
        most=10**9,
        unit="MB",
    )
    kill_grace_seconds: int = _whole(
        10, "Between SIGTERM and SIGKILL when a job is stopped", most=86400, unit="seconds"
    )

    @property
    def named(self) -> tuple[tuple[str, int], ...]:
        """`resources` as sorted (name, amount) pairs."""
        pairs = units.parse_resources(self.resources.replace(",", " ").split())
        for name, amount in pairs:
            if amount > UNITS_MAX:
                raise UserError(
                    f"worker_settings.resources: {name}={amount} is too many, at most {UNITS_MAX} can be told apart"
                )
        return pairs


class ClientSettings(Section):
    """Used by the `kueue` command."""

    name = "client_settings"

    job_default_cpus: int = _whole(
        8, "Cores of a job when --cpus is not given", most=10**6, unit="cores", in_template=True
    )
    job_default_ram_mb: int = _whole(
        8192, "Memory of a job when --ram-mb is not given", most=10**12, unit="MB", in_template=True
    )
    on_lost: str = _text(
        "rerun",
        "When a job's worker falls silent: rerun it elsewhere, wait for the worker, or fail the job",
        choices=("rerun", "wait", "fail"),
    )


class MetricsSettings(Section):
    """Where server and workers show their figures to Prometheus."""

    name = "metrics_settings"

    server_bind: str = _text(
        "127.0.0.1:11237",
        "Address and port of the server's /metrics and /healthz; `:PORT` is every address of the machine, empty: none",
    )
    worker_bind: str = _text("", "Address and port of a worker's /metrics and /healthz, like the server's; empty: none")
    server_textfile: str = _text(
        "",
        "File that the server writes its figures to every 15 s, for the textfile collector of node_exporter; an "
        "absolute path ending in .prom; empty: none",
    )


class RestartWorkers(Section):
    """Used by `kueue_restart_workers` alone; optional for all others."""

    name = "restart_workers"

    ssh_user: str = _text("", "Login on the worker machines", required=True)
    hostnames: str = _text("", "Blank- or newline-separated hosts that shall run a worker", required=True)
    sleep_minutes_before_recheck: float = _number(
        60.0,
        "Pause between two rounds; fractions are allowed, less than a second is a second",
        least=0.0,
        most=1e6,
        unit="minutes",
    )
    worker_command: str = _text(
        "",
        "Command that starts the worker on the hosts, for example ~/venv/bin/kueue_worker; empty: it is looked for "
        "where pip, pipx, uv and a virtual environment put it",
    )
    key_file: str = _text("", "Private key for the login; empty: those of the agent and of ~/.ssh")
    connect_timeout_seconds: float = _number(
        10.0, "Limit for connecting, for the greeting and for the login, each", least=0.1, most=3600.0, unit="seconds"
    )
    command_timeout_seconds: float = _number(
        30.0, "Limit for one command on a host", least=0.1, most=3600.0, unit="seconds"
    )
    parallel_hosts: int = _whole(8, "Hosts that are looked at at the same time", least=1, most=256, unit="hosts")


SECTIONS: dict[str, type[Section]] = {
    section.name: section
    for section in (
        CommonSettings,
        ServerSettings,
        WorkerSettings,
        ClientSettings,
        MetricsSettings,
        RestartWorkers,
    )
}
GLOBAL_RESOURCES = "global_resources"
GLOBAL_RESOURCES_MEANING = (
    "Free names with whole totals, for example `genus = 3`: licences and other counters of the whole lab. "
    "Only the server's file counts"
)


def guessing_time(secret: str) -> str:
    """The second half of a sentence: how long guessing takes at 3,000 guesses a second.

    That is 1,000 cores at a third of a second for each scrypt (N = 2**17, r = 8).
    """
    alphabet = sum(
        size
        for size, has in (
            (26, any("a" <= character <= "z" for character in secret)),
            (26, any("A" <= character <= "Z" for character in secret)),
            (10, any(character.isdigit() for character in secret)),
            (33, any(not character.isalnum() for character in secret)),
            (100, any(not character.isascii() for character in secret)),
        )
        if has
    )
    years = alphabet ** len(set(secret)) / 2 / 3000 / 31_557_600
    figure = f"{years:.0e} years" if years >= 1e4 else f"{years:.0f} years" if years >= 2 else f"{years * 365:.0f} days"
    return (
        f"has only {len(secret)} characters. Whoever reaches the server can guess it elsewhere: 1,000 processors need "
        f"about {figure} if it is random, and minutes to days if it is made of words. Use {SECRET_GOOD} or more."
    )


def template(secret: str) -> str:
    """The text of a new file: four sections, 16 keys with their defaults, each with its meaning."""
    lines = [
        "# Settings of kueue. A key that is missing has its default, so nothing must be rewritten on an upgrade.",
        "",
    ]
    for section in SECTIONS.values():
        chosen = {key: known for key, known in section.settings.items() if known.in_template}
        if not chosen:
            continue
        lines += [f"# {section.__doc__}", f"[{section.name}]"]
        for key, known in chosen.items():
            unit = f" ({known.unit})" if known.unit else ""
            value = secret if key == "shared_secret" else known.default
            lines += [f"# {known.meaning}{unit}.", f"{key} = {toml(value)}"]
        lines.append("")
    return "\n".join(lines)


def toml(value: Any) -> str:
    """The value as it would stand in the file; long ones are cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, dict):
        return "a section"
    return "a list" if isinstance(value, list) else "a date"
