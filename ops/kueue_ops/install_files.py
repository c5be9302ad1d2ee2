"""``kueue_install completion``, ``grafana`` and ``prometheus``: files for programs that read them by themselves."""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from kueue.errors import KueueError
from kueue_ops import assets
from kueue_ops import grafana as provisioning
from kueue_ops.completion_places import ALIASES, SHELLS, Shell, other_targets, target, to_add
from kueue_ops.steps import Steps


def completion(options: argparse.Namespace, steps: Steps) -> None:
    """Put the completion of `options.shells` where they look for it, or take it away."""
    for shell in [SHELLS[name] for name in dict.fromkeys(options.shells)] or _own_shells(options, steps):
        file = target(shell, Path.home(), os.environ)
        startup = Path.home() / shell.startup
        try:
            text = startup.read_text(encoding="utf-8", errors="replace") if shell.startup else ""
        except OSError:
            text = ""
        line = to_add(shell, file, text)
        if options.uninstall:
            _remove(steps, file)
            for other in other_targets(shell, file):
                steps.remove(other)
            if shell.line and not line:
                steps.remark(f"{shell.name}: ~/{shell.startup} still names {file}; take that line out.")
            continue
        if steps.write(file, _completion_text(shell)):
            for other in other_targets(shell, file):
                steps.write(other, shell.others)
            remark = shell.remark.format(file=file)
            if line:
                print(f"{shell.name}: write into ~/{shell.startup}: {line}")
            if remark and (line or not shell.line):
                print(f"{shell.name}: {remark}")


def _own_shells(options: argparse.Namespace, steps: Steps) -> list[Shell]:
    """To install: the login shell; to take away: all that have something from us."""
    if options.uninstall:
        known = set(steps.record.files("completion"))
        return [shell for shell in SHELLS.values() if target(shell, Path.home(), os.environ) in known]
    try:
        path = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        path = os.environ.get("SHELL", "")
    name = Path(path).name
    name = ALIASES.get(name, name)
    if name not in SHELLS:
        raise KueueError(
            f"Your login shell {path or '(unknown)'} has no completion of this kind.",
            hint=f"Name another: kueue_install completion {' '.join(SHELLS)}",
        )
    return [SHELLS[name]]


def _completion_text(shell: Shell) -> str:
    try:
        return (assets.folder("completions") / shell.source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KueueError(
            f"The completion for {shell.name} did not come with this installation of kueue.",
            hint="Install it again: pip install --force-reinstall kueue-lab",
        ) from None


def grafana(options: argparse.Namespace, steps: Steps) -> None:
    """Dashboards and provisioning in `options.folder`."""
    folder: Path = options.folder
    if options.uninstall:
        _remove_below(steps, "grafana", folder)
        return
    source = assets.folder("grafana")
    dashboards = folder / "dashboards"
    done = [steps.write(dashboards / path, text) for path, text in _texts(source, (".json",))]
    to_write = {
        folder / "provisioning/dashboards/kueue.yaml": provisioning.dashboards(str(dashboards)),
        folder / "provisioning/datasources/kueue.yaml": provisioning.data_source(options.prometheus_url),
    }
    done += [steps.write(path, text) for path, text in to_write.items()]
    if any(done):
        print(
            f"For Grafana (it must be able to read {dashboards}):\n"
            f"  sudo cp {folder}/provisioning/dashboards/kueue.yaml /etc/grafana/provisioning/dashboards/\n"
            f"  sudo cp {folder}/provisioning/datasources/kueue.yaml /etc/grafana/provisioning/datasources/\n"
            "  sudo systemctl restart grafana-server\n"
            f"Or by hand: Dashboards, New, Import, and a file of {dashboards}"
        )


def prometheus(options: argparse.Namespace, steps: Steps) -> None:
    """Scrape configuration and alert rules in `options.folder`."""
    folder: Path = options.folder
    if options.uninstall:
        _remove_below(steps, "prometheus", folder)
        return
    found = list(_texts(assets.folder("prometheus"), (".yml", ".yaml")))
    done = [steps.write(folder / path, text) for path, text in found]
    if not any(done):
        return
    rules = [folder / path for path, text in found if "\ngroups:" in f"\n{text}"]
    scrapes = [folder / path for path, text in found if "scrape_configs:" in text]
    print("For Prometheus, in its prometheus.yml (host names in the scrape configuration are yours to set):")
    if scrapes:
        print(
            "  scrape_config_files:  # Prometheus 2.43 or newer; for older ones copy what stands in there\n"
            + _items(scrapes)
        )
    if rules:
        print("  rule_files:\n" + _items(rules))
    print("then: sudo systemctl reload prometheus")


def _items(files: list[Path]) -> str:
    return "\n".join(f"    - {file}" for file in files)


def _texts(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Path below the folder, and text, of what is meant for users: tests of rules are not."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_test = any("test" in part for part in relative.parts)
        if path.suffix in suffixes and path.is_file() and not is_test:
            yield relative, path.read_text(encoding="utf-8")


def _remove_below(steps: Steps, purpose: str, folder: Path) -> None:
    files = [file for file in steps.record.files(purpose) if file.is_relative_to(folder)]
    for file in files:
        steps.remove(file)
    parents = {parent for file in files for parent in file.parents if parent.is_relative_to(folder)}
    for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        steps.remove_folder(parent)
    if not files:
        steps.remark(f"Nothing of kueue's for {purpose} is installed in {folder}.")


def _remove(steps: Steps, file: Path) -> None:
    if steps.record.state(file) == "absent":
        steps.record.forget(file)
        steps.remark(f"{file} is not there.")
    else:
        steps.remove(file)
