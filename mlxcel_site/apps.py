from django.apps import AppConfig


class SiteConfig(AppConfig):
    name = "mlxcel_site"

    def ready(self) -> None:
        from . import checks, logs  # noqa: F401  both register themselves
