"""Migrations over a database that holds documents, both ways. On both databases (make test-postgres)."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction

from embeddings import corpus
from embeddings.models import Document, Passage
from tests import stored
from tests.test_storage import contents


@pytest.fixture
def migrated() -> Iterator[None]:
    yield
    call_command("migrate", verbosity=0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("migrated")
def test_documents_survive_the_change_of_their_ids_order_and_its_reversal() -> None:
    collection, one = stored.collection(), np.eye(8, dtype=np.float32)
    documents = [stored.document(id, one[i], text=f"täxt {id}", n=i) for i, id in enumerate(["b", "A", "ä", "a_", "a%"])]
    corpus.upsert(collection, documents)
    before, rows = contents(collection), list(Document.objects.order_by("pk").values_list())
    for target in ("0004", None):
        call_command("migrate", "embeddings", *([target] if target else []), verbosity=0)
        assert contents(collection) == before and list(Document.objects.order_by("pk").values_list()) == rows
        assert corpus.upsert(collection, documents) == 0
        assert list(Document.objects.filter(external_id__startswith="a_").values_list("external_id", flat=True)) == ["a_"]
        with pytest.raises(IntegrityError), transaction.atomic():
            Document.objects.create(collection=collection, external_id="b")
    connection.check_constraints()
    with pytest.raises(IntegrityError), transaction.atomic():
        Passage.objects.filter(pk=Passage.objects.latest("pk").pk).update(document=0)
        connection.check_constraints()
