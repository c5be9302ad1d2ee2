"""A little laboratory of real programs on this machine: one server, workers, the command; all state in one folder.

Everything is started by this class and ended by it, by pid; nothing outside the folder is touched. Ports are free ones
that the server chose.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import reaper
from tests.support.ports import free_port

SECRET = "a secret of this test and of nobody else"


class Lab:
    """Files and processes of one test."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.settings: dict[str, dict[str, object]] = {
            "common_settings": {"shared_secret": SECRET, "server_name": "127.0.0.1", "server_port": self.port},
            "server_settings": {"bind_addresses": "127.0.0.1"},
            # Its default is one port for all; tests of figures choose one.
            "metrics_settings": {"server_bind": ""},
            # What else runs on the machine that tests must not decide whether a job starts.
            "worker_settings": {"dynamic_check_free_resources": False, "cores": 16, "ram_mb": 64000},
        }

    # --- configuration -----------------------------------------------------------------------------------------------

    def config(self, name: str = "lab", **overrides: dict[str, object]) -> Path:
        """Write a configuration file; `overrides` are sections."""
        merged = {
            section: {**self.settings.get(section, {}), **overrides.get(section, {})}
            for section in {**self.settings, **overrides}
        }
        path = self.folder / f"{name}.toml"
        lines = []
        for section, keys in merged.items():
            lines.append(f"[{section}]")
            lines.extend(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)
        return path

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KUEUE_", "XDG_", "COVERAGE", "PYTEST"))}
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        kept.update(
            HOME=str(home),
            KUEUE_STATE_DIR=str(self.folder / "state"),
            PYTHONPATH=str(Path(__file__).parents[2]),
            TEST_SESSION_OF_KUEUE=os.environ.get("TEST_SESSION_OF_KUEUE", ""),
        )
        kept.update(extra)
        return kept

    # --- programs ----------------------------------------------------------------------------------------------------

    def start(self, module: str, *args: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{log}.log", "ab") as stream:
            process = subprocess.Popen(
                [self.python, "-m", module, *args],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=self.environment(**environment),
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_server(self, *args: str, **sections: dict[str, object]) -> subprocess.Popen[bytes]:
        """Start the server and wait until it answers."""
        if sections or not (self.folder / "lab.toml").exists():
            for section, keys in sections.items():
                self.settings.setdefault(section, {}).update(keys)
            self.config()
        self.server = self.start("kueue.server.main", "-c", str(self.folder / "lab.toml"), *args, log="server")
        self.until(self.answers, "the server answers", process=self.server)
        return self.server

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def start_worker(self, name: str = "w1", **worker_settings: object) -> subprocess.Popen[bytes]:
        """Start a worker and wait until the server lists it online."""
        path = self.config(
            name, worker_settings={**self.settings["worker_settings"], "worker_name": name, **worker_settings}
        )
        process = self.start("kueue.worker.main", "-c", str(path), log=name)
        self.workers[name] = process
        self.until(lambda: self.worker(name).get("state") == "online", f"worker {name} is online", process=process)
        return process

    def worker(self, name: str) -> dict[str, object]:
        found = self.kueue("list-workers", "--json")
        if found.returncode != 0:
            return {}
        rows = json.loads(found.stdout)["workers"]
        return next((row for row in rows if row["name"] == name and row["state"] != "away"), {})

    def kueue(
        self, *args: str, timeout: float = 60, cwd: Path | None = None, stdin: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            [self.python, "-m", "kueue.cli.main", "-c", str(self.folder / "lab.toml"), *args],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or self.folder,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            errors="surrogateescape",
            env=self.environment(**environment),
            check=False,
        )

    def popen_kueue(self, *args: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [self.python, "-m", "kueue.cli.main", "-c", str(self.folder / "lab.toml"), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd or self.folder,
            env=self.environment(**environment),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def submit(self, *args: str, **more: object) -> int:
        """`kueue cmd` of a job that is taken; returns its id."""
        done = self.kueue("cmd", *args, **more)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def jobs(self) -> dict[int, dict[str, object]]:
        """All jobs as `list-jobs --json` tells them, by id."""
        done = self.kueue("list-jobs", "--json", "-n", "100000")
        assert done.returncode == 0, done.stderr
        return {job["id"]: job for job in json.loads(done.stdout)["jobs"]}

    def job(self, job: int) -> dict[str, object]:
        done = self.kueue("show-job", "--json", str(job))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["jobs"][0]

    # --- waiting -----------------------------------------------------------------------------------------------------

    def until(
        self,
        holds: Callable[[], object],
        what: str,
        *,
        seconds: float = 30,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Wait for a condition; fails with the logs when it does not come, or when `process` ended."""
        deadline = time.monotonic() + seconds
        while not holds():
            if process is not None and process.poll() is not None:
                raise AssertionError(f"ended with {process.returncode} before {what}:\n{self.logs()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.logs()}")
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    # --- ending ------------------------------------------------------------------------------------------------------

    def runners(self) -> list[int]:
        """Pids of runner processes (keepers, spawners) of this lab."""
        mark = f"KUEUE_STATE_DIR={self.folder / 'state'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes()
                    if b"runner-" in command and b".pyz" in command and mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    @property
    def mark(self) -> bytes:
        """In the environment of all that this lab has started, jobs included."""
        return f"HOME={self.folder / 'home'}".encode()

    def members(self) -> list[int]:
        """Pids of all that still lives of this lab, jobs included."""
        return reaper.marked(self.mark)

    def close(self) -> None:
        """End everything, at once."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        reaper.end_all(self.mark)
        for process in self.processes:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
