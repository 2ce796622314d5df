from django.urls import path

from .views import Collections, Embeddings, OneCollection, Search

urlpatterns = [
    path("v1/embeddings", Embeddings.as_view()),
    path("collections", Collections.as_view()),
    path("collections/<str:name>", OneCollection.as_view()),
    path("collections/<str:name>/search", Search.as_view()),
]
