"""Real processes over a database file, killed, interrupted, locked out, out of disk: what was stored stays, and a restart completes it."""
from __future__ import annotations

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = 1200
KILLS = 10

Rows = list[tuple[Any, ...]]


class Site:
    """A data directory of its own with its database, and `manage.py` over it."""

    def __init__(self, folder: Path, source: Path, **environment: str) -> None:
        self.folder, self.source = folder, source
        folder.mkdir()
        self.environment = {**os.environ, "MLXCEL_VAR_DIR": str(folder), "DJANGO_SETTINGS_MODULE": "tests.impatient",
                            "MLXCEL_TRANSPORT": "tests.impatient.SlowClient", "PYTHONUNBUFFERED": "1", **environment}
        migrate = self.start("migrate", "-v0")
        _, err = migrate.communicate()
        assert migrate.returncode == 0, err

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "manage.py", *args], cwd=ROOT, env=self.environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def embed(self, **options: Any) -> subprocess.Popen[str]:
        return self.start("embed_corpus", "c", str(self.source), "--json", **options)

    def finish(self) -> dict[str, Any]:
        process = self.embed()
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        return dict(json.loads(out))

    def query(self, sql: str) -> Rows:
        connection = sqlite3.connect(self.folder / "mlxcel.sqlite3", timeout=30)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def passages(self) -> Rows:
        return self.query("SELECT d.external_id, d.text, p.part, p.start, p.end, p.vector FROM embeddings_document d "
                          "LEFT JOIN embeddings_passage p ON p.document_id = d.id ORDER BY d.id, p.part")

    def count(self) -> int:
        return int(self.query("SELECT count(*) FROM embeddings_document")[0][0])

    def wait_for(self, documents: int) -> None:
        deadline = time.monotonic() + 60
        while self.count() < documents:
            assert time.monotonic() < deadline, "nothing was stored"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"_id": f"d{i}", "text": f"text number {i}", "n": i}) + "\n" for i in range(DOCUMENTS)))
    return path


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    site = Site(tmp_path_factory.mktemp("whole") / "var", source)
    assert site.finish()["embedded"] == DOCUMENTS
    return site.passages()


def killed(site: Site, times: int, moment: Callable[[], float]) -> int:
    """Starts and kills so often, each time a while after the run began; tells in how many the run was still going."""
    hit = 0
    for _ in range(times):
        process = site.embed()
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(moment())
        hit += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        rows = site.passages()
        assert [row[0] for row in rows] == [f"d{i}" for i in range(len(rows))], "each once, in order"
        assert all(row[5] is not None for row in rows), "no document without its passage"
        assert site.query("PRAGMA integrity_check") == [("ok",)]
    return hit


def test_killed_ten_times_and_restarted_it_stores_what_an_undisturbed_run_stores(source: Path, undisturbed: Rows, tmp_path: Path) -> None:
    site, chance = Site(tmp_path / "var", source), random.Random(11)
    assert killed(site, KILLS, lambda: chance.uniform(0, 0.5)) >= KILLS // 2
    before = site.count()
    report = site.finish()
    assert (report["unchanged"], report["embedded"]) == (before, DOCUMENTS - before)
    assert site.passages() == undisturbed
    assert site.finish()["unchanged"] == DOCUMENTS


def test_ctrl_c_stores_what_it_says(source: Path, undisturbed: Rows, tmp_path: Path) -> None:
    site = Site(tmp_path / "var", source)
    process = site.embed()
    site.wait_for(30)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    report = json.loads(out)
    assert process.returncode == 130 and report["exit_code"] == 130 and "Traceback" not in err
    assert report["embedded"] == site.count() and "Run the same command again" in report["stopped"]
    site.finish()
    assert site.passages() == undisturbed


def test_a_full_disk_ends_clearly_and_loses_nothing_that_was_reported(source: Path, undisturbed: Rows, tmp_path: Path) -> None:
    site = Site(tmp_path / "var", source)
    largest = max(path.stat().st_size for path in site.folder.iterdir()) + 150_000
    process = site.embed(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)))
    out, err = process.communicate(timeout=60)
    report = json.loads(out)
    assert process.returncode in (1, 3) and "Traceback" not in err
    assert " refused: " in err and "disk" in err and "Run the same command again" in err
    assert report["embedded"] == site.count() < DOCUMENTS and site.query("PRAGMA integrity_check") == [("ok",)]
    site.finish()
    assert site.passages() == undisturbed


def test_a_database_locked_by_another_process_ends_clearly_and_loses_nothing(source: Path, undisturbed: Rows, tmp_path: Path) -> None:
    site = Site(tmp_path / "var", source)
    process = site.embed()
    site.wait_for(30)
    other = sqlite3.connect(site.folder / "mlxcel.sqlite3", timeout=30, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    out, err = process.communicate(timeout=60)
    other.execute("ROLLBACK")
    other.close()
    report = json.loads(out)
    assert process.returncode == 1 and "Traceback" not in err
    assert "database is locked (another process has been writing for longer than the time-out)" in err
    assert 0 < report["embedded"] == site.count() < DOCUMENTS
    site.finish()
    assert site.passages() == undisturbed


@pytest.mark.ir
@pytest.mark.timeout(1800)
def test_killed_with_the_real_model_the_vectors_are_the_same_bit_for_bit(minilm: Path, tmp_path: Path) -> None:
    path, words = tmp_path / "corpus.jsonl", random.Random(5)
    vocabulary = ["ship", "sea", "wing", "flow", "heat", "layer", "shock", "plate", "pressure", "velocity", "model", "theory"]
    path.write_text("".join(json.dumps({"_id": f"d{i}", "text": " ".join(words.choices(vocabulary, k=words.randint(1, 180)))}) + "\n"
                            for i in range(400)))
    real = {"DJANGO_SETTINGS_MODULE": "mlxcel_site.settings", "MLXCEL_EMBEDDING_MODEL": str(minilm), "MLXCEL_BACKEND": "host",
            "MLXCEL_TRANSPORT": "inference.transports.local.LocalClient"}
    whole, site = Site(tmp_path / "whole", path, **real), Site(tmp_path / "var", path, **real)
    began = time.monotonic()
    whole.finish()
    took = time.monotonic() - began
    assert killed(site, KILLS, lambda: words.uniform(0.1, took / 6)) >= KILLS // 2
    site.finish()
    assert site.passages() == whole.passages() and site.count() == 400
