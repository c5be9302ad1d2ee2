"""Completion in real interactive shells: a person types, presses TAB, and reads the screen.

Only ``kueue`` is on PATH, in a directory with a blank in its name, as a script of the kind that pip writes.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from lab import Lab
from terminal import Terminal

ROOT = Path(__file__).parents[2]
PROMPT = "READY>"
START_FILES = {
    "bash": (".bashrc", f"PS1='{PROMPT} '\n", 'eval "$(kueue complete bash)"\n'),
    "zsh": (".zshrc", f"PS1='{PROMPT} '\nunsetopt prompt_sp\n", 'eval "$(kueue complete zsh)"\n'),
    "fish": (
        ".config/fish/config.fish",
        f"set fish_greeting\nfunction fish_prompt\n echo -n '{PROMPT} '\nend\n",
        "kueue complete fish | source\n",
    ),
    "tcsh": (".tcshrc", f"set prompt='{PROMPT} '\nset autolist\n", 'eval "`kueue complete tcsh`"\n'),
}
SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not on this machine"))
    for shell in START_FILES
]
QUOTING = SHELLS[:3]  # tcsh cannot take a candidate with a blank
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory):
    """One cache for all: compiling at each press of TAB would take longer than a TAB may."""
    return tmp_path_factory.mktemp("bytecode")


class Person:
    """A home directory, a shell in it, and what is on the screen."""

    def __init__(self, folder: Path, bytecode: Path) -> None:
        self.home = folder / "my home"
        self.home.mkdir()
        self.programs = folder / "my programs"
        self.programs.mkdir()
        program = self.programs / "kueue"
        # As pip writes it where the path of the interpreter cannot stand behind #!.
        program.write_text(
            f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
            "import sys\nfrom kueue.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        )
        program.chmod(0o755)
        self.environment = {
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home),  # else fish makes a directory below /tmp, and keeps it
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(bytecode),
            "KUEUE_STATE_DIR": str(folder / "state"),
            "KUEUE_COMPLETION_SECONDS": "20",  # what else runs on the machine must not decide
            "TEST_SESSION_OF_KUEUE": os.environ.get("TEST_SESSION_OF_KUEUE", ""),
        }
        self.terminals: list[Terminal] = []

    def sit_down(self, shell: str, before: str = "", after: str = "", *, registers: bool = True) -> Terminal:
        """Starts the shell; its start-up file may hold more before and after the line for completion."""
        name, prompt, line = START_FILES[shell]
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(prompt + before + (line if registers else "") + after)
        terminal = Terminal([shell, "-i"], self.environment, self.home)
        self.terminals.append(terminal)
        terminal.until(PROMPT)
        terminal.settle()
        return terminal


@pytest.fixture
def person(tmp_path, bytecode):
    one = Person(tmp_path, bytecode)
    yield one
    for terminal in one.terminals:
        terminal.close()


def tabs(shell):
    """Bash lists at the second press alone."""
    return 2 if shell == "bash" else 1


@pytest.mark.parametrize("shell", SHELLS)
def test_verbs_options_and_values_without_configuration_or_server(person, shell):
    terminal = person.sit_down(shell)
    assert terminal.text.strip() == PROMPT, "the start of the shell shows more than its prompt"
    terminal.press_tab("kueue list-", "list-jobs", "list-workers", "list-resources", tabs=tabs(shell))
    terminal.clear()
    terminal.press_tab("kueue list-w", "kueue list-workers ")
    terminal.clear()
    terminal.press_tab("kueue cmd --on-l", "kueue cmd --on-lost ")
    terminal.clear()
    terminal.press_tab("kueue cmd --on-lost ", "rerun", "wait", "fail", tabs=tabs(shell))
    terminal.clear()
    terminal.press_tab("kueue_server --take", "kueue_server --take-over ")
    terminal.clear()
    terminal.press_tab("cd / ; kueue list-w", "kueue list-workers ")
    terminal.clear()
    assert not (person.home / ".config/kueue").exists()
    assert not (person.home.parent / "state").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_to_run_is_completed_as_a_command_of_the_shell(person, shell):
    terminal = person.sit_down(shell)
    terminal.press_tab("kueue cmd -j 2 mkfif", "kueue cmd -j 2 mkfifo ")
    terminal.clear()
    (person.home / "results.txt").write_text("")
    terminal.press_tab("kueue cmd cat res", "kueue cmd cat results.txt")


@pytest.mark.parametrize("shell", QUOTING)
def test_a_directory_with_blanks_is_completed_and_quoted(person, shell):
    (person.home / "two words").mkdir()
    (person.home / "two words/out file.txt").write_text("")
    terminal = person.sit_down(shell)
    terminal.press_tab("kueue cmd -o tw", "kueue cmd -o two\\ words/")
    terminal.clear()
    terminal.press_tab("kueue cmd --stdout=tw", "--stdout=two\\ words/")
    terminal.clear()
    terminal.press_tab("kueue cmd ls two\\ words/o", "out\\ file.txt")


@pytest.mark.parametrize("shell", QUOTING)
def test_the_program_is_found_by_the_path_that_was_typed(person, shell):
    terminal = person.sit_down(shell, after=f"cd '{person.home}'\n")
    terminal.type("PATH=/usr/bin:/bin\n" if shell != "fish" else "set -x PATH /usr/bin /bin\n")
    terminal.settle()
    terminal.press_tab("~/../my\\ programs/kueue list-w", "kueue list-workers ")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_press_of_tab_is_silent_when_kueue_was_removed(person, shell):
    terminal = person.sit_down(shell)
    (person.programs / "kueue").unlink()
    since = terminal.mark()
    terminal.type("kueue list-w\t\t")
    terminal.settle(1)
    assert "not found" not in terminal.text[since:]
    assert "No such" not in terminal.text[since:]
    terminal.clear()
    since = terminal.mark()
    terminal.type("echo alive\n")
    terminal.until("alive\n", since=since)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not on this machine")
def test_bash_says_how_kueue_is_completed_also_where_unset_variables_are_errors(person):
    terminal = person.sit_down("bash", before="set -u\n")
    since = terminal.mark()
    terminal.type("complete -p kueue && echo status=$?\n")
    assert "complete -F _kueue kueue" in terminal.until("status=0", since=since)
    terminal.press_tab("kueue list-w", "kueue list-workers ")
    terminal.clear()
    terminal.press_tab("kueue cmd mkfif", "kueue cmd mkfifo ")
    assert "unbound" not in terminal.text


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not on this machine")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("autoload -Uz compinit && compinit -i\n", ""),
        ("", "autoload -Uz compinit && compinit -i\n"),
        ("", ""),
        ("setopt ksharrays shwordsplit nounset noglob\n", ""),
    ],
    ids=["compinit before", "compinit after", "no compinit", "odd options"],
)
def test_zsh_completes_whatever_its_start_up_file_does(person, before, after):
    terminal = person.sit_down("zsh", before, after)
    assert terminal.text.strip() == PROMPT
    terminal.press_tab("kueue list-", "list-jobs", "List workers", "list-resources")
    terminal.clear()
    terminal.press_tab("kueue list-w", "kueue list-workers ")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not on this machine")
def test_zsh_loads_the_script_from_a_folder_of_its_search_path(person):
    folder = person.home / "functions"
    folder.mkdir()
    shutil.copy(ROOT / "completions/_kueue", folder / "_kueue")
    before = "fpath=(~/functions $fpath)\nautoload -Uz compinit && compinit -i -D\n"
    terminal = person.sit_down("zsh", before, registers=False)
    terminal.press_tab("kueue list-w", "kueue list-workers ")
    terminal.clear()
    terminal.press_tab("kueue list-", "list-jobs", "List workers", "list-resources")
    terminal.clear()
    terminal.press_tab("kueue_worker --na", "kueue_worker --name ")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not on this machine")
def test_fish_loads_the_script_from_its_folder_of_completions(person):
    folder = person.home / ".config/fish/completions"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "completions/kueue.fish", folder / "kueue.fish")
    terminal = person.sit_down("fish", registers=False)
    terminal.press_tab("kueue list-w", "kueue list-workers ")


@pytest.fixture
def lab(tmp_path, person):
    """A server with a worker of an odd name and a job in each of some states; the person's home is configured for it."""
    made = Lab(tmp_path)
    made.settings["worker_settings"]["worker_name"] = "ra lab's"
    made.start_server()
    made.start_worker("ra lab's")
    config = person.home / ".config/kueue/config.toml"
    config.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "lab.toml", config)
    made.kueue("cmd", "--name", "first", "true")
    made.submit("sleep", "1000")
    made.submit("--hold", "echo", "a b'c", "$(touch trap)")
    made.until(lambda: [made.jobs()[n]["state"] for n in (0, 1, 2)] == ["succeeded", "running", "held"], "the states")
    yield made
    made.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_jobs_workers_and_resources_of_a_real_server(person, lab, shell):
    terminal = person.sit_down(shell)
    shown = terminal.press_tab("kueue show-job ", "0", "1", "2", tabs=tabs(shell))
    if shell in {"zsh", "fish"}:
        assert "running sleep 1000" in shown
        assert "succeeded first: true" in shown
        assert "$(touch trap)" in shown
    terminal.clear()
    terminal.press_tab("kueue release ", "kueue release 2 ")
    terminal.type("\n")
    lab.until(lambda: lab.job(2)["state"] != "held", "the job whose id was completed is released")
    if shell == "tcsh":
        return
    # The name holds a blank and a quote: the line that was completed must mean that worker.
    terminal.press_tab("kueue node offline r", "lab")
    terminal.type("\n")
    lab.until(lambda: lab.worker("ra lab's").get("state") == "offline", "the worker of the completed name is offline")
    assert not (person.home / "trap").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_missing_server_leaves_the_line_as_it_was(person, lab, shell):
    lab.server.kill()
    lab.server.wait()
    (person.home / "a file").write_text("")
    terminal = person.sit_down(shell)
    since = terminal.mark()
    terminal.type("kueue show-job \t")
    terminal.settle(1.5)
    shown = terminal.text[since:].replace("kueue show-job", "").replace(PROMPT, "")
    assert set(shown) <= set(" k\n"), shown  # zsh shows the first letter twice
    terminal.clear()
    terminal.press_tab("kueue list-w", "kueue list-workers ")
