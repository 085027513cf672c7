from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from synthetic_profiles import make_profile

import lhotse_oomfit.store as store_module
from lhotse_oomfit.errors import InvalidArgumentError, ProfileError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.profile import parse
from lhotse_oomfit.store import ProfileStore, cache_dir, read_profile

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMFIT_CACHE_DIR", str(tmp_path / "default-cache"))


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `code` with this package and these test modules at hand."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_was_saved_is_found_by_its_fingerprint(tmp_path: Path) -> None:
    profile = make_profile()
    store = ProfileStore(tmp_path / "cache")
    path = store.save(profile)
    assert path == tmp_path / "cache" / f"{profile.fingerprint.digest}.yaml"
    found = store.load(profile.fingerprint)
    assert (found.profile, found.reason, found.path) == (profile, None, path)


def test_an_explicit_file_is_that_very_file_and_has_no_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "repository" / "sizes.yaml"
    store = ProfileStore(path)
    assert store.save(make_profile()) == path
    assert store.load(make_profile().fingerprint).profile == make_profile()
    assert list(path.parent.iterdir()) == [path]


def test_the_environment_variable_names_the_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "default-cache"
    assert ProfileStore(None).directory == tmp_path / "default-cache"
    monkeypatch.delenv("OOMFIT_CACHE_DIR")
    assert cache_dir().name == "lhotse-oomfit"


def test_false_stores_nothing() -> None:
    store = ProfileStore(False)
    assert store.save(make_profile()) is None
    assert store.load(make_profile().fingerprint).reason == "profiles aren't stored (cache=False)"
    assert store.entries() == []
    assert store.clear() == []


@pytest.mark.parametrize("cache", ["", 3, True])
def test_anything_else_is_no_cache(cache: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cache must be a directory, a path ending in \.yaml, None"):
        ProfileStore(cache)  # type: ignore[arg-type]


def test_an_empty_cache_says_where_it_looked(tmp_path: Path) -> None:
    found = ProfileStore(tmp_path).load(make_profile().fingerprint)
    assert found.profile is None
    assert found.reason == f"no profile yet at {found.path}"


def test_a_miss_is_explained_by_the_profile_that_differs_least(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(make_profile(fields={"device": "A100", "torch": "2.11.0", "model": "Conformer"}))
    store.save(make_profile(fields={"device": "L40S", "torch": "2.9.0", "model": "Zipformer"}))
    now = Fingerprint(fields={"device": "H200", "torch": "2.11.0", "model": "Conformer"})
    found = store.load(now)
    assert found.profile is None
    assert found.near is None
    assert found.reason is not None
    assert found.reason.endswith("was measured for something else: device: A100 -> H200")


def test_an_explicit_file_for_something_else_is_explained_field_by_field(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "sizes.yaml")
    store.save(make_profile(fields={"device": "A100", "hop": "160"}))
    found = store.load(Fingerprint(fields={"device": "H200", "sdpa": "flash"}))
    assert found.profile is None
    assert found.reason == (
        f"{tmp_path / 'sizes.yaml'} was measured for something else: "
        "device: A100 -> H200; hop: 160 -> (absent); sdpa: (absent) -> flash"
    )


def test_many_differences_are_cut_short(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "sizes.yaml")
    store.save(make_profile(fields={f"field {k}": "a" for k in range(10)}))
    reason = store.load(Fingerprint(fields={f"field {k}": "b" for k in range(10)})).reason
    assert reason is not None
    assert reason.endswith(f"field 5: a -> b; and 4 more (oomfit show --why {tmp_path / 'sizes.yaml'})")


def test_a_profile_for_another_patch_version_of_torch_is_near(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    profile = make_profile(fields={"device": "H200", "torch": "2.11.0+cu128"})
    store.save(profile)
    found = store.load(Fingerprint(fields={"device": "H200", "torch": "2.11.1+cu128"}))
    assert found.profile is None
    assert found.near == profile
    assert store.load(Fingerprint(fields={"device": "H200", "torch": "2.12.0+cu128"})).near is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(b"\x80\x04\x95binary\xff", "must be UTF-8 text, has byte 0x80 at offset 0", id="binary"),
        pytest.param(b"\x00" * 64, "isn't YAML", id="zeros"),
        pytest.param(b"a: 1\n" * 10_000_000, "must be at most 1,000,000 bytes, is larger", id="50 MB"),
        pytest.param(make_profile().encode().encode()[:300], "", id="cut off"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_miss_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_bytes(data)
    found = ProfileStore(path).load(make_profile().fingerprint)
    assert found.profile is None
    assert found.reason is not None
    assert found.reason.startswith(f"unreadable: profile {path}")
    assert message in found.reason
    assert "\n" not in found.reason
    with pytest.raises(ProfileError):
        read_profile(path)


def test_a_file_checked_out_with_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_bytes(make_profile().encode().replace("\n", "\r\n").encode())
    assert read_profile(path) == make_profile()


def test_a_missing_directory_and_a_directory_in_the_way_are_misses(tmp_path: Path) -> None:
    (tmp_path / "cache" / f"{make_profile().fingerprint.digest}.yaml").mkdir(parents=True)
    found = ProfileStore(tmp_path / "cache").load(make_profile().fingerprint)
    assert found.reason is not None
    assert found.reason.startswith("unreadable: Is a directory")


def test_a_place_that_cannot_be_written_warns_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert ProfileStore(tmp_path / "file" / "cache").save(make_profile()) is None
    assert "couldn't be written (Not a directory" in caplog.text
    assert "the next run measures again" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_directory_warns_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    try:
        assert ProfileStore(tmp_path).save(make_profile()) is None
    finally:
        tmp_path.chmod(0o700)
    assert "couldn't be written (Permission denied" in caplog.text


def test_a_full_disk_warns_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "sizes.yaml")
    old = make_profile(search_s=1.0)
    store.save(old)
    # A limit on the size of files fails a write half way, as a full disk does.
    code = """
import logging, resource, sys
from pathlib import Path
from synthetic_profiles import make_profile
from lhotse_oomfit.store import ProfileStore
logging.basicConfig(stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
print(ProfileStore(Path(sys.argv[1])).save(make_profile(search_s=2.0)))
"""
    process = child(code, str(tmp_path / "sizes.yaml"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "couldn't be written (File too large" in out
    assert out.endswith("None\n")
    assert read_profile(tmp_path / "sizes.yaml") == old
    assert [p.name for p in tmp_path.iterdir() if p.name != "default-cache"] == ["sizes.yaml"]


def test_a_lock_that_is_never_released_is_warned_about_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "_LOCK_TIMEOUT_S", 0.1)
    code = """
import sys, time
from pathlib import Path
import lhotse_oomfit.store as store
with store._lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
    profile = make_profile()
    path = tmp_path / f"{profile.fingerprint.digest}.yaml"
    holder = child(code, str(path))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert ProfileStore(tmp_path).save(profile) == path
    finally:
        holder.kill()
        holder.communicate()
    assert "is held for over 0.1 s; writing" in caplog.text
    assert read_profile(path) == profile


def test_a_file_system_without_locks_is_warned_about_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import filelock

    def refuse(self: object) -> None:
        raise NotImplementedError("flock isn't supported here")

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    assert ProfileStore(tmp_path).save(make_profile()) is not None
    assert "isn't to be had (flock isn't supported here)" in caplog.text


@pytest.mark.parametrize("name", ["cache", "sizes.yaml"])
def test_two_processes_that_write_fifty_times_each_leave_a_valid_file_every_time(tmp_path: Path, name: str) -> None:
    code = """
import sys
from pathlib import Path
from synthetic_profiles import make_profile
from lhotse_oomfit.store import ProfileStore
store = ProfileStore(Path(sys.argv[1]))
for k in range(50):
    assert store.save(make_profile(search_s=float(k))) is not None
"""
    target = tmp_path / name
    writers = [child(code, str(target)) for _ in range(2)]
    store = ProfileStore(target)
    path = store.path(make_profile().fingerprint)
    assert path is not None
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen.add(read_profile(path).search_s)
        time.sleep(0.001)
    for writer in writers:
        _, err = writer.communicate()
        assert writer.returncode == 0, err
        assert err == ""
    assert read_profile(path).search_s == 49.0
    assert seen
    left = [p.name for p in path.parent.iterdir() if p.name.endswith(".tmp")]
    assert left == []


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    old = make_profile(search_s=1.0)
    store = ProfileStore(tmp_path)
    path = store.save(old)
    assert path is not None
    code = f"""
import os, sys, time
from pathlib import Path
from synthetic_profiles import make_profile
from lhotse_oomfit.store import ProfileStore
def wait(*_):
    print("writing", flush=True)
    time.sleep(60)
{moment} = wait
ProfileStore(Path(sys.argv[1])).save(make_profile(search_s=2.0))
"""
    writer = child(code, str(tmp_path))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert read_profile(path) == old
    new = make_profile(search_s=3.0)
    assert store.save(new) == path  # the dead writer's lock is gone with it
    assert read_profile(path) == new
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    for left in tmp_path.glob(".*.tmp"):
        os.utime(left, (0, 0))
    store.save(new)
    assert list(tmp_path.glob(".*.tmp")) == []


def test_a_saved_profile_can_be_read_by_others_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = ProfileStore(tmp_path).save(make_profile())
    finally:
        os.umask(before)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_symbolic_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    ProfileStore(tmp_path / "link.yaml").save(make_profile())
    assert (tmp_path / "link.yaml").is_symlink()
    assert read_profile(tmp_path / "real.yaml") == make_profile()


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        pytest.param(b"trainer:\n  max_steps: 5\n", True, id="configuration"),
        pytest.param(b"\x00\x01", False, id="control characters"),
        pytest.param(b"\x89PNG", False, id="binary"),
        pytest.param(b"", False, id="empty"),
        pytest.param(b"# Batch si", False, id="cut off"),
        pytest.param(b"bucket_duration_b", False, id="cut off without its comment"),
        pytest.param(b"\0" * 99, False, id="zeros"),
    ],
)
def test_only_a_file_that_was_never_a_profile_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes, kept: bool
) -> None:
    path = tmp_path / "train[1].yaml"
    path.write_bytes(data)
    assert (ProfileStore(path).save(make_profile()) is None) == kept
    assert (path.read_bytes() == data) == kept
    assert ("holds something else than a profile; it's left as it is" in caplog.text) == kept


def test_entries_come_latest_first_and_broken_ones_last(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    early = make_profile(fields={"device": "A"}, created="2026-01-01T00:00:00Z")
    late = make_profile(fields={"device": "B"}, created="2026-02-01T00:00:00Z")
    store.save(late)
    store.save(early)
    (tmp_path / "0123456789abcdef.yaml").write_text("a: [")
    (tmp_path / "unrelated.yaml").write_text("a: 1")
    entries = store.entries()
    assert [entry.profile for entry in entries] == [late, early, None]
    assert entries[2].error is not None
    assert "isn't YAML" in entries[2].error


def test_clear_deletes_profiles_and_nothing_else(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    path = store.save(make_profile())
    (tmp_path / "unrelated.yaml").write_text("a: 1")
    assert store.clear() == [path]
    assert store.entries() == []
    assert (tmp_path / "unrelated.yaml").exists()


def test_the_file_is_what_the_profile_encodes_to(tmp_path: Path) -> None:
    path = ProfileStore(tmp_path).save(make_profile())
    assert path is not None
    assert parse(path.read_text(encoding="utf-8")) == make_profile()
