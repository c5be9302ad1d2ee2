"""Carries out the steps of an installation and says each, or says them only (``--dry-run``)."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from kueue_ops.record import Record, write
from kueue_ops.user_services import UserServices


class Steps:
    """What is done, in order. Results go to stdout, remarks to stderr."""

    def __init__(self, record: Record, purpose: str, *, is_dry: bool, is_forced: bool) -> None:
        self.is_dry = is_dry
        self.record = record
        self.is_forced = is_forced
        self.failures = 0
        """Steps that were not done: files that somebody else has changed, commands that failed."""
        self._purpose = purpose
        self._removed: set[Path] = set()

    def say(self, done: str, to_do: str) -> None:
        """A step that is done (said after it: it may fail), or would be."""
        print(f"would {to_do}" if self.is_dry else done)

    def remark(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)

    def fail(self, sentence: str) -> None:
        """A step that cannot be done; the rest goes on, and the exit code tells."""
        self.failures += 1
        self.remark(sentence)

    def write(self, file: Path, text: str) -> bool:
        """Whether the file now is (or would be) as we want it."""
        state = self.record.state(file, text)
        if state == "changed" and not self.is_forced:
            self.fail(
                f"Kept {file}: it was changed by somebody, or is not of kueue_install. "
                "To have the new one instead: --force"
            )
            return False
        if not self.is_dry:
            if state != "same":
                write(file, text)
            self.record.note(self._purpose, file, text)
        if state == "same":
            self.say(f"unchanged {file}", f"leave {file} as it is")
        else:
            what = {"absent": "new", "ours": "renewed"}.get(state, "in the place of a changed one")
            self.say(f"wrote {file} ({what})", f"write {file} ({what})")
        return True

    def remove(self, file: Path) -> bool:
        """Whether the file is (or would be) gone."""
        state = self.record.state(file)
        if state == "changed" and not self.is_forced:
            self.fail(
                f"Kept {file}: it was changed by somebody, or is not of kueue_install. "
                "To remove it all the same: --force"
            )
            return False
        self._removed.add(file)
        if not self.is_dry:
            file.unlink(missing_ok=True)
            self.record.forget(file)
        if state != "absent":
            self.say(f"removed {file}", f"remove {file}")
        return True

    def remove_folder(self, folder: Path) -> None:
        """A folder that holds nothing any more; one that is not empty stays."""
        try:
            left = set(folder.iterdir()) - self._removed
        except OSError:
            return
        if left:
            return
        self._removed.add(folder)
        if not self.is_dry:
            try:
                folder.rmdir()
            except OSError:
                return  # somebody was faster: then it is not empty
        self.say(f"removed {folder}", f"remove {folder}")

    def systemctl(self, services: UserServices, *words: str) -> bool:
        """Whether ``systemctl --user`` did it (or would be asked to)."""
        shown = shlex.join(["systemctl", "--user", *words])
        if self.is_dry:
            print(f"would run {shown}")
            return True
        problem = services.systemctl(*words)
        if problem:
            self.fail(f"{shown}: {problem}")
            return False
        print(f"ran {shown}")
        return True
