"""The line for the login shell, and the reading of answers among noise."""

import re
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kueue_ops.remote_script import Answer, pack, quote
from kueue_ops.remote_steps import assigned


def test_the_line_has_nothing_that_a_shell_reads_in_its_own_way():
    command = pack("x='don''t!' \\ \n# ä\r\n").command
    assert command.startswith("exec /bin/sh -c ")
    words = shlex.split(command)[5:]
    assert words
    # No newline, no `!`, no quote, and a backslash only before an octal number: tcsh, fish and csh differ there.
    for word in words:
        assert re.fullmatch(r"([^\n!'\\]|\\0[0-7]{3})*", word)
        assert len(word) <= 1000
    assert command.isascii()


def test_the_marker_stands_nowhere_in_what_is_sent():
    request = pack("say a b")
    assert request.marker not in request.command
    assert pack("say a b").marker != request.marker


def test_values_reach_the_script_as_they_are():
    assert assigned("rest", a="it's", b="$(x)\n`y`") == "a='it'\\''s'\nb='$(x)\n`y`'\nrest"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_quoted_word_is_that_word(text):
    assert shlex.split(quote(text)) == [text]


def test_only_marked_lines_count():
    text = "kueue_worker\nM how screen\nnoiseM pid 1\nM pid 17\n M pid 3\nMM pid 4\nM pid.x\nM said  a b \r\nM end .\nM"
    answer = Answer("M", text)
    assert answer.word("how") == "screen"
    assert answer.lines("pid") == ("17",)
    assert answer.text("said") == " a b "
    assert answer.is_whole
    assert not answer.has("noise")
    assert answer.word("noise") == ""


def test_an_answer_without_its_end_is_not_whole():
    assert not Answer("M", "M how screen\nend .\nN end .").is_whole
    assert not Answer("M", "").is_whole


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize(
    "before",
    [
        "set -eu; export SHELLOPTS",
        "set -f; export SHELLOPTS",
        "printf() { echo no; }; sed() { :; }; command() { return 1; }; export -f printf sed command",
        "export PATH=/nowhere IFS=x CDPATH=/ POSIXLY_CORRECT=1 ENV=/dev/full BASH_ENV=/dev/full",
        "alias printf=false sh=false",
    ],
)
def test_what_a_login_shell_hands_down_does_not_change_the_script(shell, before):
    """bash as login shell, and as what plays ``sh`` on some systems."""
    if shutil.which("bash") is None or shutil.which(shell) is None:
        pytest.skip("not installed here: bash or dash")
    request = pack(
        'false; say unset "$nothing"; printf "a/b\\n" | sed s,/,-, | tell said; command -v sh >/dev/null && say ok yes\n'
    )
    command = request.command.replace("/bin/sh", str(shutil.which(shell)), 1)
    if shell == "bash":
        command = command.replace(" -c ", " --posix -c ", 1)
    done = subprocess.run(
        ["bash", "-c", f"{before}\n{command}"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    answer = Answer(request.marker, done.stdout)
    assert answer.is_whole, done
    assert (answer.word("said"), answer.word("ok")) == ("a-b", "yes")
