"""What a learner has done, kept in the user's folder of data; nothing is sent anywhere.

Only if a class's folder is set, each check also appends a line to a file there, under a nickname.
"""

from __future__ import annotations

import getpass
import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axon_nb.records.environment import CLASS_DIR, USER_DATA

_ANIMALS = (
    "badger", "bison", "crane", "dolphin", "falcon", "gecko", "heron", "ibex", "jackal", "koala", "lemur", "lynx",
    "marten", "newt", "otter", "panda", "quail", "raven", "seal", "tapir", "urchin", "viper", "walrus", "yak",
)  # fmt: skip


class Journal:
    """The learner's journal.

    Args:
        path: Its file; None: `course.json` in the user's folder of data.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or Path(USER_DATA.get()).expanduser() / "axon_nb" / "course.json"

    def read(self) -> dict[str, Any]:
        """Return all entries by exercise; empty if there are none, or the file is damaged."""
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def entry(self, exercise_id: str) -> dict[str, Any]:
        """Return the entry of one exercise: ``passed``, ``attempts``, ``hints``, ``predicted``, ``measured``."""
        return dict(self.read().get(exercise_id, {}))

    def update(self, exercise_id: str, changes: Mapping[str, Any]) -> None:
        """Change fields of an entry. A folder that cannot be written loses only this."""
        entries = self.read()
        entries[exercise_id] = {**entries.get(exercise_id, {}), **changes}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(entries, indent=1), encoding="utf-8")
            partial.replace(self._path)
        except OSError:
            return

    @property
    def seed(self) -> int:
        """What random cases start from: the same in each check of one learner."""
        return zlib.crc32(_user().encode())

    @property
    def nickname(self) -> str:
        """The learner's name on the board of a class, such as ``otter-41``."""
        number = zlib.crc32(f"{_user()} {Path.home()}".encode())
        return f"{_ANIMALS[number % len(_ANIMALS)]}-{number // len(_ANIMALS) % 100}"

    def report_to_class(self, event: Mapping[str, Any]) -> None:
        """Append an event to the nickname's file in the class's folder, if one is set."""
        if folder := CLASS_DIR.get():
            line = json.dumps({"time": round(time.time()), "learner": self.nickname, **event})
            try:
                with (Path(folder) / f"{self.nickname}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            except OSError:
                return


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
