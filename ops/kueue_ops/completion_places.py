"""Where each shell looks for the completion of a command, and what the user still has to write into a startup file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kueue.cli.programs import PROGRAMS


class Shell(msgspec.Struct, frozen=True):
    """One shell."""

    name: str
    source: str
    """File name among those that come with kueue."""
    target: str
    """Where it belongs, below one of the user's folders: ``data`` or ``config``."""
    startup: str = ""
    """File of the user's that must name the target, below the home; empty: the shell finds it by itself."""
    line: str = ""
    """What has to stand there; ``{file}`` and ``{folder}`` are put in."""
    remark: str = ""
    others: str = ""
    """For shells that look for a file by the command's name: what stands in those of the other programs, which the
    same completion serves.
    """


SHELLS = {
    shell.name: shell
    for shell in (
        Shell(
            "bash",
            "kueue.bash",
            "data/bash-completion/completions/kueue",
            remark="New terminals have it, if the package bash-completion is installed; else write into ~/.bashrc: "
            ". {file}",
            others='. "${BASH_SOURCE[0]%/*}/kueue"\n',
        ),
        Shell(
            "zsh",
            "_kueue",
            "data/zsh/site-functions/_kueue",
            ".zshrc",
            "fpath=({folder} $fpath)",
            remark="Before the line with compinit; without one add: autoload -Uz compinit && compinit",
        ),
        Shell(
            "fish",
            "kueue.fish",
            "config/fish/completions/kueue.fish",
            remark="New terminals have it.",
            others="source (status dirname)/kueue.fish\n",
        ),
        Shell("tcsh", "kueue.tcsh", "data/kueue-completion/kueue.tcsh", ".tcshrc", "source {file}"),
        Shell(
            "powershell",
            "kueue.ps1",
            "data/kueue-completion/kueue.ps1",
            ".config/powershell/Microsoft.PowerShell_profile.ps1",
            ". {file}",
        ),
        Shell("elvish", "kueue.elv", "config/elvish/lib/kueue.elv", ".config/elvish/rc.elv", "use kueue"),
    )
}
ALIASES = {"csh": "tcsh", "pwsh": "powershell"}


def target(shell: Shell, home: Path, environ: Mapping[str, str]) -> Path:
    """The file that the shell reads."""
    kind, _, rest = shell.target.partition("/")
    if shell.name == "bash" and environ.get("BASH_COMPLETION_USER_DIR", "").startswith("/"):
        return Path(environ["BASH_COMPLETION_USER_DIR"], "completions", "kueue")
    variable, usual = {"data": ("XDG_DATA_HOME", ".local/share"), "config": ("XDG_CONFIG_HOME", ".config")}[kind]
    base = environ.get(variable, "")
    # The XDG base directory specification: a relative path is to be ignored.
    return (Path(base) if base.startswith("/") else home / usual) / rest


def other_targets(shell: Shell, file: Path) -> list[Path]:
    """The files of the other programs beside that of ``kueue``."""
    return [file.with_name(f"{name}{file.suffix}") for name in PROGRAMS] if shell.others else []


def to_add(shell: Shell, file: Path, startup: str) -> str:
    """The line that the startup file (with the text `startup`) lacks; empty: none."""
    if not shell.line:
        return ""
    line = shell.line.format(file=_word(file), folder=_word(file.parent))
    lines = [one.strip() for one in startup.splitlines()]
    return "" if any(not one.startswith("#") and _names(one, line, file) for one in lines) else line


def _names(one: str, line: str, file: Path) -> bool:
    return one == line or any(str(path) in one for path in (file, file.parent))


def _word(path: Path) -> str:
    """Readable by all these shells: in single quotes where it must be."""
    text = str(path)
    plain = all(character.isalnum() or character in "/._-+" for character in text)
    return text if plain else "'" + text.replace("'", "'\\''") + "'"
