"""The command line of the server."""

from __future__ import annotations

import pytest

from kueue.server import copies, main, recovery, restore


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("KUEUE_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "config.toml"
    path.write_text('[common_settings]\nshared_secret = "a shared secret of good length"\n')
    path.chmod(0o600)
    return str(path)


def code(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main.main(words)
    return leaving.value.code


@pytest.mark.parametrize("words", [("--recover",), ("--backup", "x"), ("--restore", "x")])
def test_what_is_done_once_and_interrupted_has_not_succeeded(config, monkeypatch, words):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for module, name in ((recovery, "recover"), (copies, "take"), (restore, "restore")):
        monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):  # by which `console.concluded` ends the process
        main._concluded(("-c", config, *words))


@pytest.mark.parametrize(
    "words", [("--recover", "--backup", "x"), ("--recover", "--restore", "x"), ("--backup", "x", "--restore", "y")]
)
def test_one_thing_is_done_at_a_time(config, capsys, words):
    assert code("-c", config, *words) == 2
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--backup", "~nobody-of-this-name/x"), "There is nothing to back up"),
        (("--restore", "~nobody-of-this-name/x"), "~nobody-of-this-name/x"),
        (("--log-file", "~nobody-of-this-name/x"), "cannot be written: No such file or directory."),
    ],
)
def test_a_file_in_a_home_that_nobody_has_is_one_sentence(config, capsys, words, sentence):
    assert code("-c", config, *words) in {1, 2}
    told = capsys.readouterr().err
    assert told.startswith("Error: ")
    assert sentence in told


@pytest.mark.parametrize("option", ["--backup", "--restore", "--log-file"])
def test_an_empty_name_of_a_file_is_refused(config, capsys, option):
    assert code("-c", config, option, "") == 2
    assert "the name of a file is missing" in capsys.readouterr().err
