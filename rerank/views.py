"""Reranking: parse, call, render."""
from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from inference.client import get_client

from . import schema
from .parsing import parse_rerank
from .rendering import render_rerank


class Rerank(APIView):
    @schema.create_rerank
    def post(self, request: Request) -> Response:
        client = get_client()
        wanted = parse_rerank(request.data, client)
        return render_rerank(wanted, client.rerank(wanted.job()), sdk=request.headers.get("X-Fern-SDK-Name", ""))
