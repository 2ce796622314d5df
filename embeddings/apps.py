from django.apps import AppConfig


class EmbeddingsConfig(AppConfig):
    name = "embeddings"
    verbose_name = "Embeddings"
    default_auto_field = "django.db.models.BigAutoField"
