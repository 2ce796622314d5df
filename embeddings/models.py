"""Collections, their documents and the vectors of their passages; jobs that make them. Rows are the truth; search files are derived."""
from __future__ import annotations

import uuid

from django.core.validators import RegexValidator
from django.db import models


class VectorSpace(models.Model):
    """What makes two vectors comparable. Its fingerprint is checked on every write and every query; vectors never mix across it."""

    fingerprint = models.CharField(max_length=64, unique=True, help_text="sha256 over all the fields below")
    model_id = models.CharField(max_length=255)
    weights_hash = models.CharField(max_length=64)
    pooling = models.CharField(max_length=16)
    normalize = models.FloatField(help_text="p of the norm vectors are divided by; -1 none")
    dims = models.PositiveIntegerField(help_text="components kept of each vector")
    document_prompt = models.TextField(blank=True, help_text="text put before every document")
    max_length = models.PositiveIntegerField(help_text="tokens a passage is cut to")
    multi_vector = models.BooleanField(default=False)
    revision = models.CharField(max_length=64, blank=True, help_text="of the hub snapshot; not part of the fingerprint")
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.model_id} · {self.dims} dims · {self.fingerprint[:12]}"


class Collection(models.Model):
    """Documents embedded into one vector space, and how their texts are made."""

    name = models.CharField(max_length=100, unique=True, validators=[
        RegexValidator(r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z",
                       "use letters, digits, dots, dashes and underscores, and begin with a letter or digit")])
    token = models.UUIDField(default=uuid.uuid4, editable=False, help_text="marks search files as this collection's")
    space = models.ForeignKey(VectorSpace, on_delete=models.PROTECT, related_name="collections")
    model_source = models.CharField(max_length=1024, blank=True, help_text="the name or directory its model was loaded by")
    query_prompt = models.TextField(blank=True, help_text="text put before every query")
    id_field = models.CharField(max_length=255, blank=True, help_text="field of the source that holds the external id; empty: _id or id")
    text_fields = models.JSONField(default=list, help_text="fields of the source joined by a space into the text")
    split_tokens = models.PositiveIntegerField(default=0, help_text="tokens a passage; 0: a document is one passage")
    split_overlap = models.PositiveIntegerField(default=0, help_text="tokens neighbouring passages share")
    blank = models.CharField(max_length=8, default="skip", help_text="documents without visible text: skip, embed or fail")
    generation = models.PositiveBigIntegerField(default=0, help_text="grows with every write; search files carry it")
    deletions = models.PositiveBigIntegerField(default=0, help_text="grows whenever passages are removed")
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return self.name


class Document(models.Model):
    # Whoever writes documents or removes a collection holds the lock of the collection's row (corpus.py), so none is left without it;
    # having the database check it for every row as well takes a sixth of its time.
    collection = models.ForeignKey(Collection, on_delete=models.CASCADE, related_name="documents", db_index=False, db_constraint=False)
    external_id = models.CharField(max_length=512)
    text = models.TextField(blank=True)
    metadata = models.JSONField(default=dict, blank=True)
    content_hash = models.CharField(max_length=64, help_text="sha256 of the text, hex")
    split = models.CharField(max_length=32, help_text="how the stored passages were cut: none, or tokens:overlap")
    tokens = models.PositiveIntegerField(default=0, help_text="tokens embedded, over all passages")
    truncated = models.BooleanField(default=False, help_text="some passage was longer than the model's limit")
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["collection", "external_id"], name="one_document_per_external_id")]
        indexes = [models.Index(fields=["collection", "id"], name="truncated_documents", condition=models.Q(truncated=True))]

    def __str__(self) -> str:
        return self.external_id


class Passage(models.Model):
    """A stretch of a document and its vector: `rows` x `dims` numbers, row-major, little-endian, `dtype` as numpy spells it.

        numpy.frombuffer(vector, dtype).reshape(rows, dims)

    Rows are never updated in place: a new vector is a new row with a larger id, which is what search files are extended by.
    """

    # The database checks the document alone: a passage is written in one transaction with its document, of the same collection and space.
    collection = models.ForeignKey(Collection, on_delete=models.CASCADE, related_name="passages", db_index=False, db_constraint=False)
    document = models.ForeignKey(Document, on_delete=models.CASCADE, related_name="passages", db_index=False)
    space = models.ForeignKey(VectorSpace, on_delete=models.PROTECT, related_name="passages", db_index=False, db_constraint=False)
    part = models.PositiveIntegerField(default=0, help_text="0, 1, 2 ... within the document")
    start = models.PositiveIntegerField(default=0, help_text="first character")
    end = models.PositiveIntegerField(help_text="one past the last character")
    tokens = models.PositiveIntegerField(default=0)
    rows = models.PositiveIntegerField(default=1)
    dims = models.PositiveIntegerField()
    dtype = models.CharField(max_length=8, default="<f4")
    vector = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["document", "space", "part"], name="one_passage_per_part_and_space")]
        indexes = [models.Index(fields=["collection", "id"], name="passages_in_write_order")]

    def __str__(self) -> str:
        return f"{self.document_id}#{self.part}"


class Job(models.Model):
    """Documents to embed into a collection by bulk workers: cut into chunks, each done by whoever leases it. Counts are of documents."""

    class State(models.TextChoices):
        RUNNING = "running"
        COMPLETED = "completed"
        COMPLETED_WITH_ERRORS = "completed_with_errors"
        FAILED = "failed"
        CANCELLED = "cancelled"

    collection = models.ForeignKey(Collection, on_delete=models.CASCADE, related_name="jobs")
    state = models.CharField(max_length=24, choices=State, default=State.RUNNING, db_index=True)
    sources = models.JSONField(default=list, help_text="where its documents come from, as the command was told")
    error = models.TextField(blank=True, help_text="why it stopped, or what it waits for")
    reading_until = models.DateTimeField(null=True, help_text="the command still adds chunks, and renews this; empty: all are there")
    read = models.PositiveBigIntegerField(default=0)
    unchanged = models.PositiveBigIntegerField(default=0)
    relabelled = models.PositiveBigIntegerField(default=0, help_text="only the metadata had changed")
    blank = models.PositiveBigIntegerField(default=0, help_text="without visible text, skipped")
    embedded = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0, help_text="lines that cannot be read included")
    truncated = models.PositiveBigIntegerField(default=0)
    passages = models.PositiveBigIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(state__in=["running", "completed", "completed_with_errors", "failed",
                                                                             "cancelled"]), name="a_job_is_in_a_known_state")]

    def __str__(self) -> str:
        return f"job {self.pk}"


class Chunk(models.Model):
    """Documents of a job that are embedded together and stored in one transaction. It is whose `owner` is set, until `lease_until`."""

    class State(models.TextChoices):
        PENDING = "pending"
        RUNNING = "running"
        DONE = "done"

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="chunks", db_index=False)
    state = models.CharField(max_length=8, choices=State, default=State.PENDING)
    documents = models.BinaryField(help_text="position, id, text and metadata of each; emptied when it is done")
    count = models.PositiveIntegerField()
    attempts = models.PositiveIntegerField(default=0, help_text="leases taken; those given back in order do not count")
    owner = models.UUIDField(null=True)
    lease_until = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True, help_text="when its id was last sent to the bulk workers")

    class Meta:
        indexes = [models.Index(fields=["job", "state", "id"], name="chunks_by_state")]

    def __str__(self) -> str:
        return f"{self.job_id}/{self.pk}"


class FailedDocument(models.Model):
    """A document of a job that could not be embedded, or a line that could not be read, and why."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="failures")
    position = models.CharField(max_length=1200, help_text="file:line")
    external_id = models.CharField(max_length=512, blank=True, help_text="empty where the line did not tell it")
    message = models.TextField()
    document = models.BinaryField(help_text="as in a chunk, to try it again; empty for a line that could not be read")

    def __str__(self) -> str:
        return f"{self.position}: {self.message}"
