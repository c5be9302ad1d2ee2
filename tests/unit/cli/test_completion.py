"""What a press of TAB offers: the line in, candidates out, in this process; values come from a server on a real socket."""

from __future__ import annotations

import json
import os
import time

import msgspec
import pytest
from peer import Talk, answering
from samples import JOBS

from kueue import places
from kueue.cli import candidates, completion, verbs
from kueue.identity import identity_of

SECRET = "a secret for these tests alone"
ROWS = json.loads(msgspec.json.encode(JOBS))


@pytest.fixture(scope="session")
def identity(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys")
    directory.chmod(0o700)
    identity_of(SECRET, str(directory))
    return directory


@pytest.fixture
def tab(tmp_path, monkeypatch):
    """`tab("kueue show-job ")` gives candidate → description, or what the shell is asked to complete by itself."""
    for name in [name for name in os.environ if name.startswith(("_ARGCOMPLETE", "COMP_", "KUEUE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUEUE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    # This process is old already, and the machine may be busy.
    monkeypatch.setattr(candidates, "BUDGET_SECONDS", 20.0)
    monkeypatch.setattr(candidates, "_age_seconds", lambda: 0.0)

    def press(line, shell="fish", *, native=True, point=None, **more):
        written = []
        environ = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_SHELL": shell,
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_DFS": "\t",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line) if point is None else point),
            "_KUEUE_NATIVE": "1" if native else "",
            **more,
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        code = completion.answer(os.environ, written.append)
        text = b"".join(written).decode()
        if code == completion.FILES_EXIT_CODE:
            assert not text
            return "files"
        if code == completion.COMMAND_EXIT_CODE:
            return "command", int(text)
        assert code == 0
        return dict(one.partition("\t")[::2] for one in text.split("\n")) if text else {}

    return press


@pytest.fixture
def server(tmp_path, identity, peers):
    """A server with these answers, at the place where the configuration says."""

    def start(answers):
        cache = places.Places(str(tmp_path / "state")).cache
        for file in identity.iterdir():
            (tmp_path / "state/cache" / file.name).write_bytes(file.read_bytes())
            (tmp_path / "state/cache" / file.name).chmod(0o600)
        config = tmp_path / ".config/kueue/config.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(f'[common_settings]\nshared_secret = "{SECRET}"\nserver_port = 9\n')
        config.chmod(0o600)
        state = places.Places(str(tmp_path / "state"))
        script = answers if callable(answers) else answering(answers)
        return peers(script, state.server_socket(9, identity_of(SECRET, cache).fingerprint))

    return start


def job(number, state="running", argv=("sleep", "1"), name=None):
    return {"id": number, "state": state, "payload": {"argv": list(argv), **({"name": name} if name else {})}}


def test_every_verb_is_offered_with_its_summary(tab):
    assert tab("kueue ") == {verb.name: verb.summary for verb in verbs.VERBS.values()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kueue list-", {"list-jobs", "list-workers", "list-resources"}),
        ("kueue -c some.toml list-w", {"list-workers"}),
        ("kueue list-jobs --ru", {"--running"}),
        ("kueue cmd --on-lost ", {"rerun", "wait", "fail"}),
        ("kueue cmd --on-lost=w", {"--on-lost=wait"}),
        ("kueue node ", {"offline", "online", "dead"}),
        ("kueue complete ", set(verbs.SHELLS)),
        ("kueue up ", {"-h", "--help"}),
        ("kueue no-such-verb ", set()),
        ("kueue cmd --timeout ", set()),
        ("kueue_server --rec", {"--recover"}),
        ("/opt/a b/bin/kueue list-w".replace(" b", "\\ b"), {"list-workers"}),
        ("'/opt/a b/kueue_worker' --na", {"--name"}),
    ],
)
def test_verbs_options_and_fixed_values_are_offered(tab, line, expected):
    assert set(tab(line)) == expected


def test_an_option_is_offered_with_its_help_and_not_twice(tab):
    assert tab("kueue list-jobs --jso") == {"--json": "print JSON for programs"}
    assert tab("kueue list-jobs --json --jso") == {}
    assert set(tab("kueue cmd --resource x --resou")) == {"--resource"}


def test_only_the_line_before_the_cursor_counts(tab):
    assert set(tab("kueue list- --json", point=len("kueue list-"))) == {"list-jobs", "list-workers", "list-resources"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kueue cmd ", ("command", 2)),
        ("kueue cmd gi", ("command", 2)),
        ("kueue cmd -c 4 --resource genus gi", ("command", 6)),
        ("kueue -c 'my lab.toml' cmd -- ", ("command", 5)),
        ("kueue cmd git --ver", ("command", 2)),
        ("kueue cmd git show-job ", ("command", 2)),
        ("kueue -c cmd cmd git ", ("command", 4)),
        ("kueue cmd -o ", "files"),
        ("kueue cmd --stdout=", "files"),
        ("kueue cmd --each-line x", "files"),
        ("kueue --config ", "files"),
    ],
)
def test_files_and_the_command_are_left_to_a_shell_that_knows_better(tab, line, expected):
    assert tab(line) == expected


def test_a_shell_that_does_not_gets_names(tab, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool-one").write_text("")
    (tmp_path / "bin/tool-one").chmod(0o755)
    (tmp_path / "bin/tool-notes").write_text("")
    (tmp_path / "two words").mkdir()
    (tmp_path / "line\nend").write_text("")
    (tmp_path / ".hidden").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tmp_path / 'no such place'}")
    assert set(tab("kueue cmd tool", native=False)) == {"tool-one"}
    assert set(tab("kueue cmd ./bi", native=False)) == {"./bin/"}
    assert set(tab("kueue cmd tool-one ", native=False)) == {"bin/", "two words/"}
    assert set(tab("kueue cmd --stdout=bin/", native=False)) == {"--stdout=bin/tool-one", "--stdout=bin/tool-notes"}
    assert set(tab("kueue cmd -o ~/b", native=False)) == {"~/bin/"}
    assert set(tab("kueue cmd -o tw", "bash", native=False, _ARGCOMPLETE_DFS="")) == {r"two\ words/"}
    assert set(tab("kueue cmd -o tw", "tcsh", native=False, _ARGCOMPLETE_DFS="")) == set()
    assert set(tab("kueue cmd -o tw", "powershell", native=False)) == {"'two words/'"}


def test_jobs_are_offered_latest_first_with_state_and_command(tab, server):
    server({"ListJobs": {"type": "JobList", "jobs": [job(2), job(11, "pending", ["make", "all"], "night")]}})
    found = tab("kueue show-job ")
    assert list(found.items()) == [("11", "pending night: make all"), ("2", "running sleep 1")]


@pytest.mark.parametrize(
    ("verb", "states"),
    [
        ("wait-job", {"held", "pending", "offered", "running"}),
        ("follow", {"held", "pending", "offered", "running"}),
        ("remove-job --kill", {"held", "pending", "offered", "running"}),
        ("explain", {"held", "pending", "offered"}),
        ("hold", {"pending"}),
        ("release", {"held"}),
        ("log", set()),
        ("show-job", set()),
        ("list-jobs --failed --held", {"failed", "held"}),
    ],
)
def test_a_verb_asks_for_the_jobs_it_is_of_use_for(tab, server, verb, states):
    asked = []

    def answer(message):
        asked.append(message)
        return [{"type": "JobList", "jobs": [job(3)]}]

    server({"ListJobs": answer})
    assert set(tab(f"kueue {verb} ")) == {"3"}
    assert set(asked[0]["states"]) == states
    assert asked[0]["limit"] >= candidates.LIMIT


def test_what_was_typed_of_an_id_selects_and_an_id_is_not_offered_twice(tab, server):
    asked = []

    def answer(message):
        asked.append(message)
        return [{"type": "JobList", "jobs": [job(1), job(12), job(130)]}]

    server({"ListJobs": answer})
    assert set(tab("kueue show-job 1")) == {"1", "12", "130"}
    assert asked[0]["ids"][:3] == [[1, 1], [10, 19], [100, 199]]
    assert set(tab("kueue show-job 12 ")) == {"1", "130"}
    assert set(tab("kueue show-job 12,1")) == {"12,1", "12,12", "12,130"}
    assert set(tab("kueue show-job 12-13")) == {"12-130"}
    assert tab("kueue show-job x") == {}


def test_a_thousand_jobs_are_bounded(tab, server):
    server({"ListJobs": {"type": "JobList", "jobs": [job(number) for number in range(1000)]}})
    found = tab("kueue log ")
    assert len(found) == candidates.LIMIT
    assert "999" in found


def test_real_rows_of_the_protocol_are_understood(tab, server):
    server({"ListJobs": {"type": "JobList", "jobs": ROWS}})
    assert set(tab("kueue show-job ")) == {str(row["id"]) for row in ROWS}


WORKERS = {
    "type": "WorkerList",
    "workers": [
        {"id": 0, "name": "ralab01", "state": "online", "running": [1, 2]},
        {"id": 1, "name": "ralab02", "state": "offline", "running": []},
        {"id": 12, "name": "ralab03", "state": "silent"},
    ],
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kueue node offline ", {"ralab01": "online, 2 running"}),
        ("kueue node online ", {"ralab02": "offline"}),
        ("kueue node dead ", {"ralab02": "offline", "ralab03": "silent"}),
        ("kueue node dead ralab02 ", {"ralab03": "silent"}),
        ("kueue node dead 1", {"1": "ralab02, offline", "12": "ralab03, silent"}),
        ("kueue show-worker ", {"0": "ralab01, online, 2 running", "1": "ralab02, offline", "12": "ralab03, silent"}),
        ("kueue show-worker 1", {"1": "ralab02, offline", "12": "ralab03, silent"}),
    ],
)
def test_workers_are_offered_that_can_become_what_was_typed(tab, server, line, expected):
    server({"ListWorkers": WORKERS})
    assert tab(line) == expected


def test_of_two_thousand_workers_each_can_be_typed(tab, server):
    rows = [{"id": number, "name": f"ralab{number:04}", "state": "online"} for number in range(2000)]
    server({"ListWorkers": {"type": "WorkerList", "workers": rows}})
    assert len(tab("kueue node offline ")) == candidates.LIMIT
    assert set(tab("kueue node offline ralab199")) == {f"ralab{number}" for number in range(1990, 2000)}
    assert set(tab("kueue show-worker 1999")) == {"1999"}


def test_of_a_large_folder_each_file_can_be_typed(tab, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(6000):
        (folder / f"{number:04}").touch()
    found = tab(f"kueue -c {folder}/599", _KUEUE_NATIVE="")
    assert set(found) == {f"{folder}/{number}" for number in range(5990, 6000)}


def test_resources_are_offered_with_their_use_and_then_their_number(tab, server):
    server({"ListResources": {"type": "ResourceList", "resources": [{"name": "genus", "used": 1, "total": 3}]}})
    assert tab("kueue cmd --resource ") == {"genus": "1 of 3 in use", "genus=": "how many of 3"}
    assert set(tab("kueue cmd --resource genus=")) == {"genus=1", "genus=2", "genus=3"}
    assert set(tab("kueue cmd --resource=ge")) == {"--resource=genus", "--resource=genus="}
    assert tab("kueue cmd --resource nothing=") == {}


def test_hosts_are_those_of_the_restart_manager(tab, server, tmp_path):
    server({})
    path = tmp_path / ".config/kueue/config.toml"
    path.write_text(
        path.read_text() + '[restart_workers]\nssh_user = "ann"\nhostnames = "ralab01, ralab02,ralab01"\n'
        "sleep_minutes_before_recheck = 5\n"
    )
    assert set(tab("kueue_restart_workers --once ")) == {"ralab01", "ralab02"}
    assert set(tab("kueue_restart_workers ralab01 ")) == {"ralab02"}


def test_odd_names_do_no_harm(tab, server):
    odd = [
        "a b",
        "it's",
        "$(touch x)",
        "süß 🦊",
        "evil\nname",
        "\x1b[2J",
        "-rf",
        " ",
        "tab\there",
        "back\\slash",
        "a:b",
    ]
    rows = [{"id": n, "name": name, "state": "online"} for n, name in enumerate(odd)]
    server({"ListWorkers": {"type": "WorkerList", "workers": rows}})
    assert set(tab("kueue node offline ")) == {"a b", "it's", "$(touch x)", "süß 🦊", "back\\slash", "a:b"}
    in_bash = tab("kueue node offline ", "bash", _ARGCOMPLETE_DFS="", _ARGCOMPLETE_COMP_WORDBREAKS=" \t\n\"'><=;|&(:")
    assert {r"a\ b", r"it\'s", r"\$\(touch\ x\)", r"süß\ 🦊", r"back\\slash", "a:b"} == set(in_bash)
    in_zsh = tab("kueue node offline ", "zsh", _ARGCOMPLETE_DFS="")
    assert {"a b:online", r"back\\slash:online", r"a\:b:online"} < set(in_zsh)
    in_powershell = tab("kueue node offline ", "powershell")
    assert {"'a b'", "'it''s'", "'$(touch x)'"} < set(in_powershell)
    assert "a b" not in tab("kueue node offline ", "tcsh", _ARGCOMPLETE_DFS="")


def test_odd_commands_are_described_on_one_line(tab, server):
    server(
        {
            "ListJobs": {
                "type": "JobList",
                "jobs": [job(1, argv=["printf", "a\n\tb\x1b[31m", {"b64": "/w=="}, "x" * 500])],
            }
        }
    )
    (described,) = tab("kueue log ").values()
    assert described.isprintable()
    assert described.startswith("running printf")
    assert len(described) <= 60


def test_without_a_configuration_nothing_is_written_and_nobody_asked(tab, tmp_path):
    assert tab("kueue show-job ") == {}
    assert tab("kueue -c no-such.toml node offline ") == {}
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_not_derived_for_a_press_of_tab(tab, server, tmp_path):
    peer = server({})
    for file in (tmp_path / "state/cache").glob("identity-*"):
        file.unlink()
    assert tab("kueue show-job ") == {}
    assert not peer.talks
    assert not list((tmp_path / "state/cache").glob("identity-*"))


@pytest.mark.parametrize(
    "answers",
    [
        {"ListJobs": {"type": "Failed", "error": "No.", "hint": ""}},
        {"ListJobs": {"type": "Goodbye"}},
        lambda talk: talk.sock.close(),
        lambda talk: talk.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    ],
)
def test_a_server_that_answers_badly_means_no_candidates(tab, server, answers, capfd):
    server(answers)
    assert tab("kueue show-job ") == {}
    assert capfd.readouterr() == ("", "")


def test_a_broken_configuration_means_no_candidates(tab, server, tmp_path, capfd):
    server({})
    (tmp_path / ".config/kueue/config.toml").write_text("[common_settings\n")
    assert tab("kueue show-job ") == {}
    assert capfd.readouterr() == ("", "")


def test_a_server_that_never_answers_is_not_waited_for(tab, server, monkeypatch):
    def mute(talk: Talk) -> None:
        talk.greet()
        talk.hear()
        talk.hear()  # until the other side leaves

    server(mute)
    monkeypatch.setattr(candidates, "BUDGET_SECONDS", 0.1)
    begun = time.monotonic()
    assert tab("kueue show-job ") == {}
    assert time.monotonic() - begun < 5  # the client alone would wait for 10 s


def test_tcsh_is_understood_without_a_line_of_bash(tab, monkeypatch):
    written = []
    environ = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "tcsh",
        "_ARGCOMPLETE_IFS": " ",
        "COMMAND_LINE": "echo 'a;b' ; kueue list-w",
    }
    assert completion.is_asked(environ)
    assert completion.answer(environ, written.append) == 0
    assert written == [b"list-workers"]


def test_a_stray_variable_alone_does_not_turn_the_command_into_a_completer():
    assert not completion.is_asked({"_ARGCOMPLETE": "1"})
    assert not completion.is_asked({"COMP_LINE": "kueue "})
