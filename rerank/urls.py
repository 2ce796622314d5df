from django.urls import path

from .views import Rerank

urlpatterns = [
    path("v1/rerank", Rerank.as_view()),
    path("v1/reranking", Rerank.as_view(schema=None)),
    path("rerank", Rerank.as_view(schema=None)),
    path("reranking", Rerank.as_view(schema=None)),
]
