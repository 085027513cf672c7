"""What a calibration measured so far, kept on disk, for a job that ends before its calibration does.

Where all ranks run every trial together, a rank that runs out of memory ends the job. The next start reads here what
was measured and what failed, and goes on from there; without it, it would fail at the same step again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from lhotse_oomfit.fingerprint import Fingerprint

__all__ = ["Journal", "Observation"]

logger = logging.getLogger(__name__)

_SUFFIX = ".partial.jsonl"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The outcome of one trial.

    :param peak_bytes: the allocated peak; None if the step ran out of memory.
    :param reserved_bytes: the peak of what the allocator reserved; 0 if the step ran out of memory.
    """

    bucket: int
    size: int
    peak_bytes: int | None
    reserved_bytes: int = 0


class Journal:
    """A file of observations, one a line, after a line that says what they are of.

    :param path: where the finished profile will be; None keeps nothing.
    :param fingerprint: what is measured.
    :param budget_bytes: a step that failed with less memory than there is now says nothing.
    """

    def __init__(self, path: Path | None, *, fingerprint: Fingerprint, budget_bytes: int) -> None:
        self.path = None if path is None else path.with_name(path.name + _SUFFIX)
        self._header = {"fingerprint": fingerprint.digest, "budget_bytes": budget_bytes}
        self._budget_bytes = budget_bytes

    def read(self) -> list[Observation]:
        """What an earlier job observed; nothing if there is no such file, or it is of something else or damaged."""
        if self.path is None:
            return []
        try:
            with self.path.open("rb") as file:
                lines = file.read(_MAX_BYTES).decode("utf-8", errors="replace").split("\n")
            header, *entries = [json.loads(line) for line in lines[:-1]]  # the last is empty, or was cut off
            observations = [Observation(**entry) for entry in entries]
            former_bytes = int(header["budget_bytes"])
            same = header["fingerprint"] == self._header["fingerprint"]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s can't be read (%s); the calibration starts anew", self.path, error)
            self.discard()
            return []
        if not same:
            self.discard()
            return []
        return [o for o in observations if o.peak_bytes is not None or former_bytes >= 0.98 * self._budget_bytes]

    def start(self, observations: list[Observation]) -> None:
        """Begin the file anew with these observations."""
        if self.path is None:
            return
        path = self.path
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._write(temporary, [self._header, *map(vars, observations)])
        with contextlib.suppress(OSError):
            os.replace(temporary, path)

    def add(self, observation: Observation) -> None:
        """Append one observation."""
        if self.path is not None:
            self._write(self.path, [vars(observation)])

    def discard(self) -> None:
        """Remove the file: the profile is there, or what was kept is of no use."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _write(self, path: Path, lines: list[dict[str, object]]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            logger.warning("what was measured so far can't be kept in %s (%s)", path, error)
            self.path = None
