from django.urls import path

from .views import Collections, Embeddings, Jobs, NativeEmbeddings, OneCollection, OneJob, Search

urlpatterns = [
    path("v1/embeddings", Embeddings.as_view()),
    path("embedding", NativeEmbeddings.as_view()),
    path("embeddings", NativeEmbeddings.as_view(schema=None)),
    path("collections", Collections.as_view()),
    path("collections/<str:name>", OneCollection.as_view()),
    path("collections/<str:name>/search", Search.as_view()),
    path("jobs", Jobs.as_view()),
    path("jobs/<str:job>", OneJob.as_view()),
]
