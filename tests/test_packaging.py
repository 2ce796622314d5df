"""What is installed: pinned versions, and the sample corpus as package data."""
from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in CONSTRAINTS)}


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(r) for r in PROJECT["dependencies"] + [r for name in extras if name != "reference" for r in extras[name]]]
    unpinned = [str(r) for r in wanted if canonicalize_name(r.name) not in PINS]
    outside = [f"{r} is pinned to {PINS[canonicalize_name(r.name)]}" for r in wanted
               if canonicalize_name(r.name) in PINS and not r.specifier.contains(PINS[canonicalize_name(r.name)], prereleases=True)]
    assert not unpinned and not outside


def test_constraints_are_plain_pins_without_addresses() -> None:
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[a-z0-9.-]+==[0-9][\w.]*", line)] == []
    assert sorted(CONSTRAINTS) == CONSTRAINTS


def lines(name: str) -> list[str]:
    return (files("embeddings") / "sample" / name).read_text("utf-8").splitlines()


def test_the_sample_corpus_is_complete_and_its_ids_are_unique() -> None:
    corpus = [json.loads(line) for line in lines("corpus.jsonl")]
    assert len(corpus) >= 130 and len({d["_id"] for d in corpus}) == len(corpus) == len({d["text"] for d in corpus})
    for document in corpus:
        assert document.keys() == {"_id", "title", "text", "subject", "level", "language"}, document["_id"]
        assert 40 <= len(document["text"].split()) <= 110, document["_id"]
        assert document["level"] in {"basic", "intermediate", "advanced"}
    assert min(Counter(d["subject"] for d in corpus).values()) >= 5     # so that ranking within a subject matters


def test_the_sample_judgements_name_queries_and_documents_that_exist() -> None:
    documents, queries = ({json.loads(line)["_id"] for line in lines(f"{name}.jsonl")} for name in ("corpus", "queries"))
    judged = [line.split() for line in lines("qrels.trec")]
    assert {query for query, *_ in judged} == queries
    assert all(zero == "0" and document in documents and grade == "1" for _, zero, document, grade in judged)
    assert all(1 <= n <= 3 for n in Counter(query for query, *_ in judged).values())
