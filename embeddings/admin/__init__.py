"""The admin: look at collections, documents and their vectors, at why a document was found, and at jobs.
Nothing here writes; deleting and cancelling are real.

    collections   list with sizes, a collection's page, its search page
    documents     list, a document's page with its vectors, neighbours and how its sentences answer a query
    jobs          bulk jobs and the documents that failed in them
    spaces        what makes vectors comparable
    sizes         counts and bytes of a collection, once a generation
    texts         passages marked in their text, excerpts, sentences
    look          a stored vector decoded, measured and drawn
"""
from django.contrib import admin

from . import collections, documents, jobs, spaces

__all__ = ["collections", "documents", "jobs", "spaces"]

admin.site.site_title = admin.site.site_header = "mlxcel"
admin.site.index_title = "Collections and their vectors"
