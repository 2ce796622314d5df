"""The commands as a newcomer meets them: no table, no directory, nobody has set anything up."""
from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import FAKE, ROOT, environment


def manage(var: Path, *args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "manage.py", *args], cwd=ROOT, env=environment(var, **{**FAKE, **settings}), text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, timeout=100)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_writes_makes_the_tables_and_what_only_reads_says_what_does(tmp_path: Path) -> None:
    var, source = tmp_path / "above" / "var", tmp_path / "c.jsonl"
    source.write_text(json.dumps({"id": 1, "text": "a boat"}) + "\n")
    for command in (["search_corpus", "c", "boat"], ["list_jobs"]):
        done = manage(var, *command)
        assert done.returncode == 2 and f"{var}/mlxcel.sqlite3 holds nothing yet: `manage.py embed_corpus" in done.stderr
    done = manage(var, "embed_corpus", "c", str(source))
    assert done.returncode == 0 and done.stderr.count("Making the tables in") == 1, done.stderr
    assert "a boat" in manage(var, "search_corpus", "c", "boat").stdout
    done = manage(var, "search_corpus", "other", "boat")
    assert done.returncode == 2 and f"There is no collection 'other' in {var}/mlxcel.sqlite3" in done.stderr
    assert [mode(var.parent), mode(var), mode(var / "mlxcel.sqlite3")] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_has_seen_enough_ends_a_command_quietly(tmp_path: Path, unbuffered: str) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(json.dumps({"id": 1, "text": "a boat"}) + "\n")
    manage(tmp_path / "var", "embed_corpus", "c", str(source))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "manage.py", "list_jobs"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True,
                              env=environment(tmp_path / "var", **FAKE, PYTHONUNBUFFERED=unbuffered), timeout=100)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_login_can_be_made_first_by_two_at_once(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "manage.py", "ensure_admin", "--username", name], cwd=ROOT, text=True,
                                env=environment(tmp_path / "var", **FAKE), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for name in ("one", "two")]
    told = [process.communicate(timeout=100) for process in running]
    assert all(out.startswith("admin login") for out, _ in told), told
    assert "".join(err for _, err in told).count("Making the tables in") == 1


@pytest.mark.parametrize("command", [["ensure_admin"], ["search_corpus", "c", "q"], ["check"], ["serve"]])
def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    for var in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x")):
        done = manage(var, *command)
        assert done.returncode == 2 and done.stderr.startswith(f"MLXCEL_VAR_DIR={var} cannot be used: "), done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("setting", "value", "said"), [
    ("DATABASE_URL", "nonsense", "DATABASE_URL='nonsense': expected postgres://"),
    ("MLXCEL_INDEX_FROM", "many", "MLXCEL_INDEX_FROM='many': expected a number"),
    ("MLXCEL_TRANSPORT", "no.such.Client", "MLXCEL_TRANSPORT='no.such.Client' cannot be loaded: No module named 'no'; expected"),
    ("MLXCEL_LOG_LEVEL", "loud", "MLXCEL_LOG_LEVEL='loud': expected one of INFO, DEBUG, WARNING, ERROR, CRITICAL"),
    ("MLXCEL_BACKEND", "abacus", "MLXCEL_BACKEND='abacus'")])
def test_settings_that_cannot_work_are_exit_code_two(tmp_path: Path, setting: str, value: str, said: str) -> None:
    for command in (["ensure_admin"], ["search_corpus", "c", "q"], ["serve", "--port", "1"]):
        done = manage(tmp_path / "var", *command, **{setting: value})
        assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize(("setting", "value", "said"), [
    ("MLXCEL_MODELS_DIR", "/no/such", "MLXCEL_MODELS_DIR=/no/such: there is no such directory"),
    ("PROMETHEUS_MULTIPROC_DIR", "/no/such", "PROMETHEUS_MULTIPROC_DIR=/no/such: there is no such directory"),
    ("MLXCEL_CACHE_DIR", f"{__file__}/cache", f"MLXCEL_CACHE_DIR={__file__}/cache: {__file__} is not a directory"),
    ("DATABASE_URL", "sqlite:////no/such/x.sqlite3", "DATABASE_URL names a file in /no/such, and there is no such directory"),
    ("MLXCEL_API_KEY_FILE", "/no/such", "MLXCEL_API_KEY_FILE='/no/such' cannot be read: No such file"),
    ("DATABASE_URL", "mysql://me:s3cret@localhost/x", "DATABASE_URL=mysql://...: expected postgres://"),
    ("DATABASE_URL", "postgres://me:s3cret@localhost:no/x", "DATABASE_URL=postgres://...: its host or port cannot be read; expected"),
    ("DATABASE_URL", "sqlite://folder/x.sqlite3", "DATABASE_URL=sqlite://...: expected postgres://"),
    ("MLXCEL_BULK_LEASE_SECS", "0", "MLXCEL_BULK_LEASE_SECS='0': expected a number, 1 or more"),
    ("MLXCEL_BULK_LEASE_SECS", "nan", "MLXCEL_BULK_LEASE_SECS='nan': expected a number, 1 or more"),
    ("MLXCEL_PROPS", "maybe", "MLXCEL_PROPS='maybe': expected one of 1, true, yes, on"),
    ("MLXCEL_STRICT_FIELDS", "perhaps", "MLXCEL_STRICT_FIELDS='perhaps': expected one of 1, true, yes, on"),
    ("MLXCEL_REDIS_URL", "redis://localhost:notaport", "MLXCEL_REDIS_URL='redis://localhost:notaport': the port is not a number"),
    ("MLXCEL_TRANSPORT", "os.path", "MLXCEL_TRANSPORT='os.path' cannot be loaded: path is no class; expected"),
    ("MLXCEL_INDEX", "fast", "MLXCEL_INDEX='fast': expected auto or exact"),
    ("MLXCEL_LOG_FORMAT", "xml", "MLXCEL_LOG_FORMAT='xml': expected one of console, json")])
def test_check_names_files_and_choices_that_are_none(tmp_path: Path, setting: str, value: str, said: str) -> None:
    done = manage(tmp_path / "var", "check", **{setting: value})
    assert done.returncode and said in done.stderr and "s3cret" not in done.stderr, done.stderr


def test_a_bulk_worker_says_so_in_one_line(tmp_path: Path) -> None:
    settings = {"MLXCEL_REDIS_URL": "redis://localhost", "MLXCEL_BULK_LEASE_SECS": "0"}
    done = subprocess.run([sys.executable, "-m", "celery", "-A", "mlxcel_site", "worker", "-Q", "bulk", "-P", "threads"], cwd=ROOT,
                          text=True, env=environment(tmp_path / "var", **settings), capture_output=True, timeout=100)
    assert done.returncode and done.stderr == "error: MLXCEL_BULK_LEASE_SECS='0': expected a number, 1 or more\n"


def test_settings_that_are_blank_are_their_defaults(tmp_path: Path) -> None:
    blank = dict.fromkeys(("DATABASE_URL", "MLXCEL_REDIS_URL", "MLXCEL_PROPS", "MLXCEL_BULK_LEASE_SECS", "MLXCEL_INDEX_FROM"), "")
    assert manage(tmp_path / "var", "check", **blank).returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_only_be_read_is_named(tmp_path: Path) -> None:
    var = tmp_path / "var"
    assert manage(var, "ensure_admin").returncode == 0
    var.chmod(0o500)
    try:
        done = manage(var, "search_corpus", "c", "q")
    finally:
        var.chmod(0o700)
    assert done.returncode == 2 and str(var) in done.stderr and "let this user write" in done.stderr
