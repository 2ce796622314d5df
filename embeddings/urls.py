from django.urls import path

from .views import Collections, Embeddings, NativeEmbeddings, OneCollection, Search

urlpatterns = [
    path("v1/embeddings", Embeddings.as_view()),
    path("embedding", NativeEmbeddings.as_view()),
    path("embeddings", NativeEmbeddings.as_view(schema=None)),
    path("collections", Collections.as_view()),
    path("collections/<str:name>", OneCollection.as_view()),
    path("collections/<str:name>/search", Search.as_view()),
]
