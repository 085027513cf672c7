"""Where profiles are kept: one file per fingerprint in a cache directory, or one file that the user named.

Writes are atomic (a temporary file in the same directory, synced, then renamed over the old one), so a reader, a
second job or a kill never sees half a profile. A lock keeps writers apart where the file system supports one; since
the rename alone keeps every file whole, a lock that can't be had is warned about and done without.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from lhotse_oomfit.errors import InvalidArgumentError, ProfileError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.profile import HEADER, Profile, parse
from lhotse_oomfit.strict_yaml import MAX_CHARS

__all__ = ["Entry", "Lookup", "ProfileStore", "cache_dir", "read_profile"]

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 10.0
_STALE_S = 3600.0  # a temporary file this old belongs to a job that was killed
_MAX_COMPARED = 64  # profiles looked at to explain a miss
_MAX_SHOWN = 6  # differences named in a reason


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What was found for a fingerprint.

    :param profile: the profile measured for exactly this, else None.
    :param reason: why there is none, in words that finish "calibrating: ..."; None with a profile.
    :param path: the file that was looked for; None if nothing is stored.
    :param near: a profile that differs in nothing but torch's patch version: worth a quick check instead of a search.
    """

    profile: Profile | None
    reason: str | None
    path: Path | None
    near: Profile | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file in the cache: its profile, or the error that reading it gave."""

    path: Path
    profile: Profile | None
    error: str | None


class ProfileStore:
    """Keeps profiles.

    :param cache: None for the cache directory (see :func:`cache_dir`); a path that ends in ``.yaml`` or ``.yml`` for
        that very file; another path for that directory; False to store nothing.
    :raises InvalidArgumentError: another value.
    """

    def __init__(self, cache: str | os.PathLike[str] | Literal[False] | None = None) -> None:
        self.directory: Path | None = None
        self.file: Path | None = None
        if cache is False:
            return
        if (cache is not None and not isinstance(cache, (str, os.PathLike))) or cache == "":
            raise InvalidArgumentError(
                f"cache must be a directory, a path ending in .yaml, None (the user's cache) or False (store nothing), "
                f"is {cache!r}; pass one of those"
            )
        path = cache_dir() if cache is None else Path(cache).expanduser()
        if path.suffix.lower() in {".yaml", ".yml"} and not path.is_dir():
            self.file = path
        else:
            self.directory = path

    def path(self, fingerprint: Fingerprint) -> Path | None:
        """Where the profile for a fingerprint is or would be kept; None if nothing is stored."""
        return self.file or (self.directory / f"{fingerprint.digest}.yaml" if self.directory else None)

    def load(self, fingerprint: Fingerprint) -> Lookup:
        """Look for the profile measured for exactly this fingerprint. A file that can't be used is a miss, no error."""
        path = self.path(fingerprint)
        if path is None:
            return Lookup(profile=None, reason="profiles aren't stored (cache=False)", path=None)
        try:
            profile = read_profile(path)
        except FileNotFoundError:
            return self._miss(fingerprint, path)
        except (ProfileError, OSError) as error:
            return Lookup(profile=None, reason=f"unreadable: {_words(error)}", path=path)
        if profile.fingerprint == fingerprint:
            return Lookup(profile=profile, reason=None, path=path)
        return self._other(fingerprint, profile, path, path)

    def save(self, profile: Profile) -> Path | None:
        """Write a profile in place of the old one.

        :return: its path; None if nothing is stored, or if it couldn't be written (a full or read-only disk, a file
            there that is no profile), which is logged as a warning: the job goes on and measures again next time.
        """
        path = self.path(profile.fingerprint)
        if path is None:
            return None
        try:
            path = Path(os.path.realpath(path))  # write through a symbolic link instead of replacing it
            path.parent.mkdir(parents=True, exist_ok=True)
            if _is_foreign(path):
                logger.warning(
                    "%s holds something else than a profile; it's left as it is and the profile isn't kept: "
                    "name another file, or delete it", path,
                )  # fmt: skip
                return None
            with _lock(path):
                _sweep(path)
                _replace(path, profile.encode().encode("utf-8"))
        except OSError as error:
            logger.warning(
                "profile %s couldn't be written (%s); going on without: the next run measures again",
                path,
                _words(error),
            )
            return None
        return path

    def entries(self) -> list[Entry]:
        """Every profile kept here, the latest first; files that can't be read come last, with their error."""
        found = []
        for path in self._files():
            try:
                found.append(Entry(path=path, profile=read_profile(path), error=None))
            except (ProfileError, OSError) as error:
                found.append(Entry(path=path, profile=None, error=_words(error)))
        return sorted(found, key=_age, reverse=True)

    def clear(self) -> list[Path]:
        """Delete every profile kept here, and what killed jobs left behind.

        :return: the profiles that were deleted.
        :raises OSError: a file that can't be deleted.
        """
        removed = self._files()
        for path in removed:
            path.unlink(missing_ok=True)
            for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                left.unlink(missing_ok=True)
        return removed

    def _files(self) -> list[Path]:
        if self.file is not None:
            return [self.file] if self.file.is_file() else []
        if self.directory is None or not self.directory.is_dir():
            return []
        return sorted(p for p in self.directory.iterdir() if re.fullmatch(r"[0-9a-f]{16}\.yaml", p.name))

    def _miss(self, fingerprint: Fingerprint, path: Path) -> Lookup:
        """Explain a miss by the profile that differs least, if there is any."""
        others = (
            [entry for entry in self.entries()[:_MAX_COMPARED] if entry.profile is not None] if self.directory else []
        )
        if not others:
            return Lookup(profile=None, reason=f"no profile yet at {path}", path=path)
        nearest = min(others, key=lambda entry: _distance(entry, fingerprint))
        if nearest.profile is None:
            return Lookup(profile=None, reason=f"no profile yet at {path}", path=path)
        return self._other(fingerprint, nearest.profile, path, nearest.path)

    def _other(self, fingerprint: Fingerprint, profile: Profile, path: Path, where: Path) -> Lookup:
        differences = profile.fingerprint.differences(fingerprint)
        shown = "; ".join(differences[:_MAX_SHOWN])
        if len(differences) > _MAX_SHOWN:
            shown += f"; and {len(differences) - _MAX_SHOWN} more (oomfit show --why {where})"
        near = profile if profile.fingerprint.is_near(fingerprint) else None
        reason = f"{where} was measured for something else: {shown}"
        return Lookup(profile=None, reason=reason, path=path, near=near)


def cache_dir() -> Path:
    """``$OOMFIT_CACHE_DIR``, else ``lhotse-oomfit`` in the platform's user cache directory."""
    chosen = os.environ.get("OOMFIT_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("lhotse-oomfit", appauthor=False))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file.

    :raises ProfileError: the file holds no profile that can be used: too big, binary, cut off, another version, ...
    :raises OSError: there's no such file, or it can't be read.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_CHARS + 1)
    if len(data) > MAX_CHARS:
        raise ProfileError(
            f"profile {path}: must be at most {MAX_CHARS:,} bytes, is larger; that's no profile: delete it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"profile {path}: must be UTF-8 text, has byte 0x{data[error.start]:02x} at offset {error.start}; "
            f"that's no profile, or a damaged one: delete it"
        ) from error
    return parse(text.replace("\r\n", "\n"), path=str(path))


def _distance(entry: Entry, fingerprint: Fingerprint) -> int:
    return len(entry.profile.fingerprint.differences(fingerprint)) if entry.profile is not None else 10**9


def _age(entry: Entry) -> tuple[bool, str, str]:
    return (entry.profile is not None, entry.profile.created if entry.profile else "", entry.path.name)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep other writers of this file out, or warn. The lock lives beside a cached file, else in the cache directory:
    a profile kept in a repository gets no neighbour."""
    import filelock

    if re.fullmatch(r"[0-9a-f]{16}\.yaml", path.name):
        where = path.with_name(f".{path.stem}.lock")
    else:
        where = cache_dir() / f".{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.lock"
    lock = None
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(where, timeout=_LOCK_TIMEOUT_S)
        lock.acquire()
    except filelock.Timeout:
        logger.warning(
            "lock %s is held for over %g s; writing %s without it (delete the lock if no job runs)",
            where, _LOCK_TIMEOUT_S, path,
        )  # fmt: skip
    except (OSError, NotImplementedError) as error:  # no room, or a file system without locks
        logger.warning("lock %s isn't to be had (%s); writing %s without it", where, _words(error), path)
    try:
        yield
    finally:
        if lock is not None and lock.is_locked:
            lock.release()


def _replace(path: Path, data: bytes) -> None:
    """Write `data` to a new file beside `path`, sync it, and rename it over `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # not every system can sync a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _is_foreign(path: Path) -> bool:
    """Whether a text is there that was never a profile, not even a damaged one: some configuration, say."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CHARS).decode("utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    named = any(mark in text for mark in ("oomfit", "bucket_")) or HEADER.startswith(text[: len(HEADER)])
    damaged = named or any(ch < " " and ch not in "\t\r\n" for ch in text)
    return not damaged and bool(text.strip())


def _sweep(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()


def _words(error: Exception) -> str:
    """An error in one line, without the number that OSError puts in front."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())
