from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase

from .. import jobs
from ..counted import counted
from ..models import FailedDocument, Job
from .base import ReadOnlyAdmin


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin[Job]):
    list_display = ["number", "collection", "state", "read", "embedded", "failed", "told", "created_at", "finished_at"]
    list_filter = ["state", "collection"]
    list_select_related = ["collection"]
    ordering = ["-pk"]
    sortable_by = ()
    actions = ["cancel", "delete_selected"]
    fields: ClassVar[tuple[str, ...]] = (
        "collection", "state", "told", "sources", "reading", "read", "embedded", "unchanged", "relabelled", "blank", "failed", "truncated",
        "passages", "tokens", "chunks", "created_at", "finished_at")

    @admin.display(description="job")
    def number(self, job: Job) -> int:
        return job.pk

    @admin.display(description="error", empty_value="")
    def told(self, job: Job) -> str:
        return jobs.told(job)

    @admin.display(description="command")
    def reading(self, job: Job) -> str:
        return ("has read all of the sources" if job.reading_until is None else "reads the sources" if jobs.reading(job)
                else "ended before it had read all of the sources")

    @admin.display
    def chunks(self, job: Job) -> str:
        counts = jobs.chunks(job)
        waiting = counts.pop("waiting")
        return ", ".join(f"{count:,} {state}" for state, count in counts.items()) + f"; {counted(waiting, 'document')} waiting"

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Stopping work is for those who may delete it."""
        actions = super().get_actions(request)
        return actions if self.has_delete_permission(request) else {}

    def has_delete_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        """Not while it runs: its workers and its command would find it gone."""
        return super().has_delete_permission(request, obj) and (obj is None or obj.state != Job.State.RUNNING)

    @admin.action(permissions=["delete"], description="Delete selected jobs")
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponseBase | None:
        if running := list(queryset.filter(state=Job.State.RUNNING).order_by("pk")):
            self.message_user(request, f"Nothing was deleted: {', '.join(map(str, running))} "
                                       f"{'runs' if len(running) == 1 else 'run'} still. Cancel first.", messages.ERROR)
            return None
        return delete_selected(self, request, queryset)

    @admin.action(description="Cancel selected jobs")
    def cancel(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        cancelled = sum(jobs.cancel(job) for job in queryset)
        self.message_user(request, f"Cancelled: {counted(cancelled, 'job')}. What is stored stays.",
                          messages.SUCCESS if cancelled else messages.WARNING)


@admin.register(FailedDocument)
class FailedDocumentAdmin(ReadOnlyAdmin[FailedDocument]):
    list_display = ["position", "external_id", "message", "job"]
    list_filter = ["job__collection"]
    list_select_related = ["job"]
    search_fields = ["external_id__startswith", "position__startswith"]
    search_help_text = "Beginning of an external id or of a place"
    ordering = ["-pk"]
    sortable_by = ()
    fields: ClassVar[tuple[str, ...]] = ("job", "position", "external_id", "message")

    def has_delete_permission(self, request: HttpRequest, obj: FailedDocument | None = None) -> bool:
        return False
