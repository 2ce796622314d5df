from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularJSONAPIView, SpectacularSwaggerView

from .errors import handler400, handler403, handler404, handler500  # noqa: F401  Django looks for them here
from .metrics import metrics
from .views import Base, Health, Models, OneModel, Props, Ready, home

urlpatterns = [
    path("", home, name="home"),
    path("", include("embeddings.urls")),
    path("", include("rerank.urls")),
    path("v1", Base.as_view(schema=None)),
    path("v1/models", Models.as_view(), name="models"),
    path("v1/models/<path:model>", OneModel.as_view()),
    path("models", Models.as_view(schema=None)),
    path("models/<path:model>", OneModel.as_view(schema=None)),
    path("props", Props.as_view()),
    path("metrics", metrics),
    path("health", Health.as_view()),
    path("health/ready", Ready.as_view(), name="ready"),
    path("v1/health", Health.as_view(schema=None)),
    path("v1/health/ready", Ready.as_view(schema=None)),
    path("openapi.json", SpectacularJSONAPIView.as_view(), name="schema"),
    path("docs", SpectacularSwaggerView.as_view(url_name="schema", http_method_names=["get", "head"]), name="docs"),
    path("admin/", admin.site.urls),
]
