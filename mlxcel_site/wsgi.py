"""The WSGI application: what granian or any other WSGI server is pointed at."""
import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mlxcel_site.settings")
_django = get_wsgi_application()

from .checks import require_sound_configuration  # noqa: E402  needs Django's settings
from .middleware import ChunkedBody  # noqa: E402

require_sound_configuration()
application = ChunkedBody(_django)
