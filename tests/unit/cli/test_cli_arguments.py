"""The grammar of the command line."""

from __future__ import annotations

import pytest

from kueue.cli import arguments, verbs
from kueue.errors import UsageError


@pytest.mark.parametrize(
    ("words", "command", "wait"),
    [
        ("cmd ls --wait -c", ["ls", "--wait", "-c"], False),
        ("cmd --wait ls -c", ["ls", "-c"], True),
        ("cmd -w -- ls -c", ["ls", "-c"], True),
        ("cmd -- -x --help", ["-x", "--help"], False),
        ("cmd -c 9 sleep 9", ["sleep", "9"], False),
        ("cmd -c9 sleep 9", ["sleep", "9"], False),
        ("cmd -wc 9 sleep 9", ["sleep", "9"], True),
        ("cmd -wc9 sleep 9", ["sleep", "9"], True),
        ("cmd --cpus=9 sleep 9", ["sleep", "9"], False),
        ("cmd --cpus 9 sleep 9", ["sleep", "9"], False),
        ("cmd -o - cat", ["cat"], False),
        ("cmd - x", ["-", "x"], False),
        ("cmd help", ["help"], False),
        ("cmd ls -- x", ["ls", "--", "x"], False),
        ("cmd --name -w ls", None, False),
        ("cmd cmd cmd", ["cmd", "cmd"], False),
        ("cmd list-jobs -h", ["list-jobs", "-h"], False),
        ("-c x.toml cmd ls -c", ["ls", "-c"], False),
        ("cmd --each-line - gzip {} -9", ["gzip", "{}", "-9"], False),
        ("cmd --each-line files", [], False),
        ("cmd", [], False),
        ("cmd --", [], False),
    ],
)
def test_the_first_word_that_is_no_option_of_cmd_starts_the_command(words, command, wait):
    if command is None:
        with pytest.raises(UsageError):
            arguments.parse(words.split())
        return
    chosen = arguments.parse(words.split())
    assert chosen.command == command
    assert chosen.wait == wait


@pytest.mark.parametrize(
    "words",
    [
        "nonsense",
        "--nonsense list-jobs",
        "cmd --nonsense ls",
        "cmd --cpu 4 ls",
        "cmd -c x ls",
        "cmd -c -1 ls",
        "cmd -c 1_0 ls",
        "cmd -c ٣ ls",
        "cmd -j 0 ls",
        "cmd -c",
        "cmd --on-lost never ls",
        "cmd --timeout soon ls",
        "show-job",
        "show-job x",
        "show-job -1",
        "show-job 7-3",
        "wait-job 1,",
        "remove-job --kil 1",
        "list-jobs -n x",
        "list-jobs --status",
        "node asleep ralab04",
        "node offline",
        "--patience soon list-jobs",
    ],
)
def test_what_is_not_understood_is_a_usage_error(words):
    with pytest.raises(UsageError):
        arguments.parse(words.split())


def test_without_a_verb_there_is_none():
    assert arguments.parse([]).verb is None
    assert arguments.parse(["-c", "x.toml"]).verb is None


def test_ids_and_ranges_are_put_in_order_and_joined():
    assert arguments.parse(["wait-job", "7-9", "3", "8,10"]).ids == [(3, 3), (7, 10)]
    assert arguments.parse(["list-jobs"]).ids == []


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_options_of_all_verbs_are_taken_before_and_behind_each(verb):
    common = ["--config", "x.toml", "--debug", "--patience=5"]
    example = verbs.VERBS[verb].example.partition(" && ")[0].split()[2:]
    before, behind = arguments.parse([*common, verb, *example]), arguments.parse([verb, *common, *example])
    assert vars(before) == vars(behind)
    assert (behind.config, behind.debug, behind.patience) == ("x.toml", True, 5.0)


@pytest.mark.parametrize(
    ("words", "ids", "more"),
    [
        ("remove-job 3 --kill 4", [(3, 4)], {"kill": True}),
        ("list-jobs 3 -n 5 7 --json 9", [(3, 3), (7, 7), (9, 9)], {"num_jobs": 5, "json": True}),
        ("list-jobs 3 -pn5 7 -- 9", [(3, 3), (7, 7), (9, 9)], {"num_jobs": 5}),
        ("wait-job 3 --patience 1m 4", [(3, 4)], {"patience": 60.0}),
        ("show-job 7 --debug", [(7, 7)], {"debug": True}),
    ],
)
def test_ids_may_stand_before_and_behind_options(words, ids, more):
    chosen = arguments.parse(words.split())
    assert chosen.ids == ids
    assert {key: getattr(chosen, key) for key in more} == more


def test_names_of_workers_may_stand_before_and_behind_options():
    chosen = arguments.parse(["node", "dead", "ralab04", "--force", "ralab05"])
    assert (chosen.state, chosen.names, chosen.force) == ("dead", ["ralab04", "ralab05"], True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("doctor -c x.toml", "unknown: -c x.toml; -c stands before the verb"),
        ("log -V 3", "unknown: -V; -V stands before the verb"),
        ("cmd --cpu 4 true", "unknown: --cpu; did you mean --cpus?"),
        ("cmd --ram=4 true", "unknown: --ram=4; did you mean --ram-mb?"),
        ("list-jobs --patient 5", "unknown: --patient; did you mean --patience?"),
        ("remove-job 3 --kil", "unknown: --kil; did you mean --kill?"),
        ("list-jobs 7 -n", "expected one argument"),
        ("list-jobs -C x 5", "unknown: -C"),
        ("wait-job -1", "Not an id: '-1'. Write for example 3, 3-7 or 1,4-6."),
        ("doctor --zzz 4", "unknown: --zzz 4"),
        ("doctor 4", "unknown: 4"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_what_may_be_meant(words, sentence):
    with pytest.raises(UsageError) as caught:
        arguments.parse(words.split())
    assert str(caught.value).endswith(sentence)


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("help", "usage: kueue [-h]"),
        ("help cmd", "usage: kueue cmd"),
        ("help cmd echo hi", "usage: kueue cmd"),
        ("-c x.toml help show-job", "usage: kueue show-job"),
        ("help --config x.toml show-job", "usage: kueue show-job"),
    ],
)
def test_help_is_there_as_a_word_too(words, usage, capsys):
    with pytest.raises(SystemExit) as caught:
        arguments.parse(words.split())
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(usage)


def test_state_filters_add_up():
    assert arguments.parse(["list-jobs", "-p", "-f", "--held"]).states == ["pending", "failed", "held"]
    assert arguments.parse(["list-jobs", "-porsfc"]).states == [
        "pending",
        "offered",
        "running",
        "succeeded",
        "failed",
        "canceled",
    ]


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_help_of_every_verb_has_an_example_that_the_parser_accepts(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        arguments.parse([verb, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    example = verbs.VERBS[verb].example
    assert f"example:\n  {example}" in text
    assert arguments.parse(example.partition(" && ")[0].split()[1:]).verb == verb


def test_the_parser_of_one_verb_is_the_same_as_that_verb_in_the_parser_of_all():
    parts = arguments.parser()._subparsers._group_actions[0].choices
    assert list(parts) == list(verbs.VERBS)
    for verb in verbs.VERBS:
        assert arguments._parser_of(verb)[1].format_help() == parts[verb].format_help()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("jobs", "Did you mean list-jobs?"),
        ("list-job", "Did you mean list-jobs?"),
        ("squeue -u me", "Did you mean list-jobs?"),
        ("kill 7", "Did you mean remove-job?"),
        ("submit ./x.sh", "Did you mean cmd?"),
        ("./my_script.py --fast", "To run it: kueue cmd ./my_script.py"),
        ("python3 x.py", "To run a command: kueue cmd python3"),
    ],
)
def test_a_word_that_is_no_verb_is_answered_with_what_may_be_meant(words, hint):
    with pytest.raises(UsageError, match="there is no verb") as caught:
        arguments.parse(words.split())
    assert hint in caught.value.hint


def test_all_that_other_queues_call_a_verb_leads_to_one_that_exists():
    assert set(verbs.ALSO_CALLED) <= set(verbs.VERBS)
    others = " ".join(verbs.ALSO_CALLED.values()).split()
    assert len(set(others)) == len(others)
    assert not set(others) & set(verbs.VERBS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("cmd -r 8G true", "memory is given in MB, like 8192"),
        ("cmd -r 1.5GiB true", "memory is given in MB, like 1536"),
        ("cmd -r 500MB true", "memory is given in MB, like 500"),
        ("cmd -r lots true", "memory is given in MB, like 8192"),
        ("cmd --timeout soon true", "Write for example 45 (seconds), 90m, 1h30m or 2d."),
        ("show-job night", "Names are no ids: `kueue list-jobs`"),
        ("show-job 7-", "Write for example 3, 3-7 or 1,4-6."),
    ],
)
def test_a_value_that_cannot_be_read_is_answered_with_one_that_can(words, sentence):
    with pytest.raises(UsageError) as caught:
        arguments.parse(words.split())
    assert sentence in str(caught.value)
