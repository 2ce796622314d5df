from django.apps import AppConfig


class RerankConfig(AppConfig):
    name = "rerank"
