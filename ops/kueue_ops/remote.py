"""One host over ssh: look at it, start its worker, stop it, renew it, ask its doctor, give it a configuration.

Rules
- Every method raises `HostTrouble` and nothing else for what the host does; its `trouble` is the line of that host.
- What is on the host is decided by what the worker itself says (``kueue_worker --status``) and by sessions of exactly
  the name `SESSION`; never by an exit code alone, never by a text search.
- One object is used by one thread; as many objects as one likes by as many threads.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from kueue import log
from kueue.cli import doctor
from kueue.settings import RestartWorkers
from kueue_ops import remote_steps
from kueue_ops.address import HostAddress
from kueue_ops.remote_answers import ending, last_line, noted, service_of, sessions_of
from kueue_ops.remote_script import Answer, pack, quote
from kueue_ops.sight import SESSION, UNIT, HostSight
from kueue_ops.ssh import Bound, HostConnection, Limits
from kueue_ops.ssh_settings import SshConfig
from kueue_ops.trouble import HostTrouble, trouble

__all__ = ["HostTrouble", "Remote", "RemoteOptions", "StartReport"]

STOP_LIMIT_SECONDS = 120.0
"""A unit (45 s), an orderly stop (20 s), a kill (20 s), and a session that does not end by itself."""
START_LIMIT_SECONDS = 2 * remote_steps.START_SECONDS + 30.0
"""A try in a session, one under our own eyes, and programs of the system that take their time."""
RENEW_LIMIT_SECONDS = STOP_LIMIT_SECONDS + START_LIMIT_SECONDS
DOCTOR_LIMIT_SECONDS = doctor.LIMIT_SECONDS + 20.0
"""What it takes by itself, and the login shell's files, the search for it, the start of Python on a busy machine."""
_DISK = re.compile(r"no space left|read-only file system|quota exceeded|input/output error", re.IGNORECASE)
_CANNOT_RUN = {126, 127}
"""Exit codes of ``sh`` for a command that it cannot execute or find."""


class RemoteOptions(NamedTuple):
    """How to reach hosts and what to run there; the same for all of them."""

    ssh_user: str = ""
    """Login where the address names none; empty: as ssh_config says, else our own name."""
    key_file: str = ""
    connect_timeout_seconds: float = 10.0
    command_timeout_seconds: float = 30.0
    worker_command: str = ""
    """A path or a command for ``sh``; empty: it is looked for."""
    ssh_config: Path | None = None
    """This file alone; None: ~/.ssh/config and /etc/ssh/ssh_config."""

    @classmethod
    def of(cls, settings: RestartWorkers, *, ssh_config: Path | None = None) -> RemoteOptions:
        """Those of the section ``[restart_workers]``."""
        return cls(
            settings.ssh_user,
            settings.key_file,
            settings.connect_timeout_seconds,
            settings.command_timeout_seconds,
            settings.worker_command,
            ssh_config,
        )


class StartReport(msgspec.Struct, frozen=True):
    """A worker that was started, and found to live."""

    how: Literal["screen", "setsid", "service", "running"]
    """``service``: by its unit; ``running``: one was there already when the start came."""
    pid: int | None
    """Of the worker; None: it lives and has not taken its lock yet, because it waits for its configuration."""
    noted: tuple[str, ...] = ()
    """Remarks worth a line."""


class Remote:
    """An open connection to one host; ends with the ``with`` block."""

    def __init__(
        self, address: HostAddress, options: RemoteOptions | RestartWorkers, bound: Bound | None = None
    ) -> None:
        """Nothing happens until the ``with`` block begins; `bound` is asked for a lane before the login."""
        self.address = address
        self.options = options if isinstance(options, RemoteOptions) else RemoteOptions.of(options)
        self._bound = bound
        self._open: HostConnection | None = None

    def __enter__(self) -> Remote:  # noqa: PYI034  Self is not in Python 3.10
        options = self.options
        self._open = HostConnection(
            self.address,
            SshConfig(options.ssh_config),
            Limits(options.connect_timeout_seconds, options.command_timeout_seconds),
            default_user=options.ssh_user,
            key_file=options.key_file,
            bound=self._bound,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called from another thread to end a method that waits; that one raises `HostTrouble` then."""
        if self._open is not None:
            self._open.close()

    # --- what can be done --------------------------------------------------------------------------------------------

    def look(self) -> HostSight:
        """What is on the host now. Dead screen sessions of our name are told and wiped."""
        answer = self._ask(remote_steps.LOOK, setting=self.options.worker_command)
        command = answer.word("line")
        status = self._status(answer, command) if command else {}
        sessions = tuple(sessions_of(answer))
        kills = answer.word("kills").split()[-1:] == ["true"]
        return HostSight(
            host_name=answer.word("host_name"),
            boot_id=answer.word("boot_id"),
            sessions=sessions,
            has_screen=bool(answer.word("has_screen")),
            command=command,
            tried=answer.lines("tried"),
            version=str(status.get("version") or ""),
            worker_name=str(status.get("name") or ""),
            worker_pid=status.get("pid"),
            worker_version=str(status.get("running_version") or ""),
            last_words="" if status.get("pid") else str(status.get("last_words") or status.get("trouble") or ""),
            noted=(*self._remarks(), *noted(answer, sessions, kills=kills)),
            state_dir=str(status.get("state_dir") or ""),
            log_file=str(status.get("log_file") or ""),
            service=service_of(answer),
            ends_at_logout=kills,
        )

    def start(self, sight: HostSight) -> StartReport:
        """A worker by its unit or in a detached session, as `sight` of this host says how; returns when it lives.

        Less than 10 s, twice that if it dies. Raises `HostTrouble`: ``not_found``, ``disk``, ``screen``, or ``died``
        with its last words.
        """
        return self._started(sight, self._bring_up(remote_steps.START, sight, START_LIMIT_SECONDS))

    def stop(self, *, by_force: bool = False) -> str:
        """Ends worker and session in order; returns a sentence. Running jobs go on under their runner.

        `by_force`: what does not end in order is killed. Raises `HostTrouble` ``command`` if it does not end.
        """
        sight = self.look()
        answer = self._ask(
            remote_steps.STOP,
            limit=max(STOP_LIMIT_SECONDS, self.options.command_timeout_seconds),
            line=sight.command,
            state=sight.state_dir,
            force=" --force" if by_force else "",
        )
        return self._stopped(sight, answer)

    def renew(self, sight: HostSight) -> StartReport:
        """A new worker in the place of one that is old or hung, or of a session that has none.

        It comes to its end on the host also when this connection breaks in the middle.
        """
        answer = self._bring_up(remote_steps.RENEW, sight, RENEW_LIMIT_SECONDS, force=" --force")
        if not answer.has("how") and not answer.has("disk"):
            self._check_stopped(sight, answer)
        return self._started(sight, answer)

    def run_doctor(self) -> Any:
        """The findings of ``kueue doctor --json`` there, about the settings of the worker: what its JSON holds."""
        config = ""
        with contextlib.suppress(HostTrouble):  # the doctor tells it better, or has the same trouble
            config = self._config()
        answer = self._ask(
            remote_steps.DOCTOR,
            limit=max(DOCTOR_LIMIT_SECONDS, self.options.command_timeout_seconds),
            setting=self.options.worker_command,
            config=config,
        )
        if not answer.word("kueue"):
            raise self._not_found(answer.lines("tried"), self.options.worker_command)
        try:
            return json.loads(answer.text("doctor.out"))
        except ValueError as error:
            said = log.complaint(answer.text("doctor.err")) or last_line(answer.text("doctor.out")) or "nothing"
            raise trouble(
                "command",
                f"{self.address}: `kueue doctor` there said: {said}.",
                f"On that host: {answer.word('kueue')} doctor",
            ) from error

    def push_config(self, text: str, *, force: bool = False) -> Literal["written", "same", "differs"]:
        """Puts a configuration there where the worker reads it (0600 in a directory of 0700, all or nothing).

        ``differs``: another one is there and was left alone; `force` replaces it.
        """
        data = text.encode("utf-8", "surrogateescape")
        answer = self._ask(
            remote_steps.PUSH,
            data,
            config=self._config(),
            force="yes" if force else "",
            size=str(len(data)),
        )
        result = answer.word("result")
        if result in {"written", "same", "differs"}:
            return result  # type: ignore[return-value]  # just looked at
        target = answer.word("to")
        said = last_line(answer.text("push.err"))
        if answer.has("damaged") and not said:
            raise trouble(
                "command",
                f"{self.address}: a start-up file of the login shell reads what is sent; {target} was not written.",
                f"Make it stop in logins without a terminal. This must print nothing: {self._line()} true",
            )
        if _DISK.search(said):
            raise self._disk(target, said)
        raise trouble("command", f"{self.address}: {target} could not be written: {said or 'no reason was given'}.")

    # --- how ---------------------------------------------------------------------------------------------------------

    def _ask(self, script: str, data: bytes = b"", *, limit: float | None = None, **values: str) -> Answer:
        assert self._open is not None, "used outside of its with block"
        request = pack(remote_steps.assigned(script, **values))
        said = self._open.run(request.command, data, until=request.end, limit_seconds=limit)
        answer = Answer(request.marker, said.stdout)
        if answer.is_whole:
            return answer
        others = [line for line in said.stdout.splitlines() if not line.startswith(request.marker)]
        noise = last_line(said.stderr) or last_line("\n".join(others))
        code = "" if said.exit_code < 0 else f" (exit code {said.exit_code})"
        raise trouble(
            "command",
            f"{self.address}: the login there ended before our command had run{code}{f': {noise}' if noise else ''}.",
            f"A start-up file of the login shell exits, or logins are restricted. This must print ok: "
            f"{self._line()} echo ok",
        )

    def _config(self) -> str:
        """Path of the configuration that the worker there reads; empty: the usual one.

        Of a command that a person wrote into worker_command only the command itself can tell. Raises `HostTrouble` if
        it does not.
        """
        if not self.options.worker_command:
            return ""
        answer = self._ask(remote_steps.ASK, setting=self.options.worker_command)
        command = answer.word("line")
        return str(self._status(answer, command).get("config") or "") if command else ""

    def _line(self) -> str:
        assert self._open is not None, "used outside of its with block"
        return self._open.target.command_line

    def _remarks(self) -> tuple[str, ...]:
        return tuple(self._open.remarks) if self._open is not None else ()

    def _bring_up(self, script: str, sight: HostSight, limit: float, **values: str) -> Answer:
        if not sight.command:
            raise self._not_found(sight.tried, self.options.worker_command)
        command = f"exec {sight.command}"
        if sight.log_file:
            command += f" --log-file {quote(sight.log_file)}"
        return self._ask(
            script,
            b"",
            limit=max(limit, self.options.command_timeout_seconds),
            state=sight.state_dir,
            log=sight.log_file,
            command=command,
            line=sight.command,
            kills="yes" if sight.ends_at_logout else "",
            by_unit="yes" if sight.service else "",
            **values,
        )

    def _started(self, sight: HostSight, answer: Answer) -> StartReport:
        """What became of a start. Raises `HostTrouble` if it is no worker."""
        if answer.has("disk"):
            raise self._disk(sight.state_dir, answer.word("disk"))
        how = answer.word("how")
        if how == "screen" and answer.word("start.exit") not in {"", "0"}:
            said = last_line(answer.text("start.err")) or "it said nothing"
            raise trouble(
                "screen",
                f"{self.address}: screen could not start a session: {said}.",
                f"On that host: screen -dmS {SESSION} {sight.command}",
            )
        if answer.has("gone"):
            raise self._died(sight, answer)
        pid = answer.word("pid")
        notes = []
        if how == "service":
            notes.append(f"{self.address}: by systemctl --user restart {UNIT}.")
        if how == "setsid":
            why = "its screen starts nothing" if answer.has("again") else "no screen there"
            notes.append(f"{self.address}: {why}, the worker runs without a session.")
        if not pid:
            said = log.complaint(answer.text("said"))
            notes.append(f"{self.address}: the worker lives and does not work yet{f': {said}' if said else '.'}")
        if sight.ends_at_logout and how != "service" and not answer.has("scope"):
            notes.append(_linger(self.address))
        return StartReport(how, int(pid) if pid else None, tuple(notes))  # type: ignore[arg-type]  # told by our own script

    def _check_stopped(self, sight: HostSight, answer: Answer) -> None:
        """Raises `HostTrouble` if the worker has not ended."""
        if sight.command and answer.word("stop.exit") != "0":
            said = log.complaint(answer.text("stop.out")) or "no reason was given"
            raise trouble(
                "command",
                f"{self.address}: the worker was not stopped: {said}",
                f"On that host: {sight.command} --stop",
            )

    def _stopped(self, sight: HostSight, answer: Answer) -> str:
        if answer.has("service.enabled"):
            if answer.word("service.exit") != "0":
                said = last_line(answer.text("service.err")) or f"exit code {answer.word('service.exit')}"
                raise trouble(
                    "command", f"{self.address}: {UNIT} was not stopped: {said}", f"systemctl --user stop {UNIT}"
                )
            self._check_stopped(sight, answer)
            again = ""
            if answer.word("service.enabled").startswith("enabled"):
                again = f" It starts again with the machine, unless: systemctl --user disable {UNIT}"
            return f"Stopped {UNIT} (systemctl --user stop); its running jobs go on.{again}"
        self._check_stopped(sight, answer)
        ended = len(answer.lines("ended"))
        return last_line(answer.text("stop.out")) or f"{ended or 'No'} screen session{'s' * (ended != 1)} ended."

    def _status(self, answer: Answer, command: str) -> dict[str, Any]:
        """What ``--status`` says. Raises `HostTrouble` if it says nothing of use: then nothing is known."""
        lines = answer.lines("status")
        for line in lines:
            if line.startswith("{"):
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and "state_dir" in found:
                    return found
        code = int(lines[-1].removeprefix("exit ")) if lines and lines[-1].startswith("exit ") else -1
        said = [line.removeprefix("Error: ") for line in lines[:-1] if line.strip() and not line.startswith("Hint: ")]
        text = said[-1].strip() if said else f"nothing (exit code {code})"
        if any(_DISK.search(line) for line in said):
            raise self._disk("its state directory", next(line for line in said if _DISK.search(line)))
        if "unrecognized arguments: --status" in text:
            raise trouble(
                "command",
                f"{self.address}: {command} is of a version that is too old to be looked at.",
                "Install the version of this machine there.",
            )
        kind: Literal["not_found", "command"] = "not_found" if code in _CANNOT_RUN else "command"
        raise trouble(
            kind, f"{self.address}: {command} does not run there: {text}", f"On that host: {command} --status"
        )

    def _died(self, sight: HostSight, answer: Answer) -> HostTrouble:
        said = log.complaint(answer.text("said")) or log.complaint(answer.text("start.err"))
        if answer.word("how") == "service":
            service = service_of(answer)
            said = (service.why if service else "") or said or "systemd gives no reason."
            return trouble(
                "died", f"{self.address}: {UNIT} did not start: {said}", f"On that host: systemctl --user status {UNIT}"
            )
        if _DISK.search(said):
            return self._disk(sight.state_dir, said)
        return trouble(
            "died",
            f"{self.address}: the worker ended at once: {said or ending(answer.word('ended'))}",
            f"On that host: {sight.command}" + (f"; what it said: {sight.log_file}" if sight.log_file else ""),
        )

    def _disk(self, place: str, complaint: str) -> HostTrouble:
        return trouble(
            "disk",
            f"{self.address}: nothing can be written to {place or 'the disk'} there: "
            f"{last_line(complaint) or 'no reason was given'}.",
            f"{self._line()} df -h {place if place.startswith('/') else '~'}",
        )

    def _not_found(self, tried: tuple[str, ...], setting: str) -> HostTrouble:
        where = f"worker_command = {setting}" if setting else ", ".join(tried)
        return trouble(
            "not_found",
            f"{self.address}: no kueue_worker was found there; tried: {where}.",
            "Install kueue there, or name the command in restart_workers.worker_command.",
        )


def _linger(address: HostAddress) -> str:
    return f"{address}: logind there may end the worker when this login ends; on that host: loginctl enable-linger"
