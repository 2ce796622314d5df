"""The WSGI application: what granian or any other WSGI server is pointed at."""
import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mlxcel_site.settings")
_django = get_wsgi_application()

from django.conf import settings  # noqa: E402

from .checks import require_sound_configuration  # noqa: E402  needs Django's settings
from .middleware import ChunkedBody, Prefix  # noqa: E402

require_sound_configuration()
application = Prefix(ChunkedBody(_django), settings.API_PREFIX) if settings.API_PREFIX else ChunkedBody(_django)
