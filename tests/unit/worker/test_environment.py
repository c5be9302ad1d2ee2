"""What a job finds in its environment."""

from __future__ import annotations

from kueue.model import Allocation, Payload, Place, Request, Share, Terms, to_os_text
from kueue.protocol.messages import Offer
from kueue.worker.environment import Account, additions, base_environment

ACCOUNT = Account("ada", "/home/ada", "/bin/zsh")
SHARE = Share(node=1, slots=2, cores=3, ram_mb=4)


def offer(*env, keep_background=False):
    return Offer(
        offer=9,
        job=7,
        attempt=2,
        payload=Payload(argv=("true",)),
        place=Place(cwd="/", env=env),
        request=Request(),
        terms=Terms(keep_background=keep_background),
        allocation=Allocation((SHARE,)),
    )


def test_what_concerns_the_worker_alone_does_not_reach_jobs():
    own = {
        "PATH": "/bin",
        "LANG": "C.UTF-8",
        "KUEUE_CONFIG": "/secret.toml",
        "KUEUE_ANYTHING": "x",
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": "1",
        "LISTEN_FDS": "3",
        "INVOCATION_ID": "1",
        "JOURNAL_STREAM": "8:1",
        "STY": "1.screen",
        "SSH_TTY": "/dev/pts/1",
        "PWD": "/old",
    }
    assert set(base_environment(own, ACCOUNT)) == {"PATH", "LANG", "HOME", "USER", "LOGNAME", "SHELL"}


def test_the_account_fills_in_what_is_missing_and_changes_nothing():
    base = base_environment({"HOME": "/else"}, ACCOUNT)
    assert base == {"HOME": "/else", "USER": "ada", "LOGNAME": "ada", "SHELL": "/bin/zsh"}
    assert base_environment({}, Account("", "", "")) == {}


def test_what_the_submitter_sent_wins_and_kueue_says_what_the_job_got():
    env = {"PATH": "/bin", "A": "1"} | additions(offer(("A", "2"), ("KUEUE_CPUS", "99")), SHARE, "lab1")
    assert env == {
        "PATH": "/bin",
        "A": "2",
        "KUEUE_JOB_ID": "7",
        "KUEUE_ATTEMPT": "2",
        "KUEUE_CPUS": "3",
        "KUEUE_RAM_MB": "4",
        "KUEUE_SLOTS": "2",
        "KUEUE_WORKER": "lab1",
    }


def test_bytes_that_are_not_utf8_survive():
    env = additions(offer((to_os_text("N\udcff"), to_os_text("\udcfe"))), SHARE, "w")
    assert env["N\udcff"] == "\udcfe"


def test_gpus_are_numbered_for_the_job_only_when_it_has_some():
    share = Share(node=1, slots=1, cores=1, ram_mb=0, named=(("fpga", (0,)), ("gpu", (0, 3))))
    assert additions(offer(), share, "w")["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert "CUDA_VISIBLE_DEVICES" not in additions(offer(), SHARE, "w")


def test_a_job_that_may_leave_processes_behind_may_start_services():
    assert additions(offer(keep_background=True), SHARE, "w")["KUEUE_INSIDE_JOB"] == "1"
    assert "KUEUE_INSIDE_JOB" not in additions(offer(), SHARE, "w")
