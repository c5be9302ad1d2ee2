"""The runner's own file in the state directory."""

import pytest

from kueue.errors import KueueError
from kueue.worker.runner_program import RunnerProgram, runner_archive
from tests.support.nobody import kept_from


@pytest.mark.parametrize("left", [b"", b"PK half"])
def test_a_file_that_a_power_loss_has_cut_short_is_written_again(tmp_path, left):
    RunnerProgram(tmp_path, "i", scopes=None, linger_seconds=1.0).prepare()
    (path,) = tmp_path.glob("runner-*.pyz")
    path.write_bytes(left)
    RunnerProgram(tmp_path, "i", scopes=None, linger_seconds=1.0).prepare()
    assert path.read_bytes() == runner_archive()
    assert list(tmp_path.glob("runner-*")) == [path]


def test_a_directory_that_cannot_be_entered_is_a_sentence_each_time(tmp_path):
    program = RunnerProgram(tmp_path / "state", "i", scopes=None, linger_seconds=1.0)
    (tmp_path / "state").mkdir()
    program.prepare()
    for _ in range(2):
        with kept_from(tmp_path / "state"), pytest.raises(KueueError, match="Permission denied"):
            program.prepare()
    program.prepare()
