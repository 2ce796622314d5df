"""The routes of embeddings and collections: parse, call, render."""
from __future__ import annotations

from django.db.models import Count
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from inference.client import get_client

from . import corpus, jobs, schema
from .models import Collection
from .parsing import parse_embed, parse_native, parse_search
from .rendering import render_collection, render_embeddings, render_hits, render_job, render_job_in_full, render_native
from .search import search


class Embeddings(APIView):
    @schema.create_embeddings
    def post(self, request: Request) -> Response:
        client = get_client()
        wanted = parse_embed(request.data, client)
        return render_embeddings(wanted, client.embed(wanted.job()))


class NativeEmbeddings(APIView):
    @schema.create_native_embeddings
    def post(self, request: Request) -> Response:
        client = get_client()
        wanted = parse_native(request.data, client)
        return render_native(wanted, client.embed(wanted.job()))


class Collections(APIView):
    @schema.list_collections
    def get(self, request: Request) -> Response:
        found = Collection.objects.select_related("space").annotate(document_count=Count("documents")).order_by("name")
        return Response({"object": "list", "data": [render_collection(collection) for collection in found]})


class OneCollection(APIView):
    @schema.retrieve_collection
    def get(self, request: Request, name: str) -> Response:
        collection = corpus.get(name)
        collection.document_count = collection.documents.count()  # type: ignore[attr-defined]
        return Response(render_collection(collection))


class Search(APIView):
    @schema.search_collection
    def post(self, request: Request, name: str) -> Response:
        collection = corpus.get(name)
        wanted = parse_search(request.data)
        result = search(collection, wanted.query, client=get_client(), limit=wanted.limit, filter=wanted.filter,
                        include_text=wanted.include_text, rerank=wanted.rerank, candidates=wanted.candidates)
        return render_hits(collection, result, include_text=wanted.include_text)


class Jobs(APIView):
    @schema.list_jobs
    def get(self, request: Request) -> Response:
        return Response({"object": "list", "data": [render_job(job) for job in jobs.newest(100)]})


class OneJob(APIView):
    @schema.retrieve_job
    def get(self, request: Request, job: str) -> Response:
        return Response(render_job_in_full(jobs.get(job)))
