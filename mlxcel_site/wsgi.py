"""The WSGI application: what granian or any other WSGI server is pointed at."""
import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mlxcel_site.settings")
_django = get_wsgi_application()

from django.conf import settings  # noqa: E402

from .bodies import Bodies  # noqa: E402
from .checks import require_sound_configuration  # noqa: E402  needs Django's settings
from .middleware import Prefix  # noqa: E402

require_sound_configuration()
# Half of the threads at most read bodies; a server that does not tell how many it has gets a share that is small.
bodies = Bodies(_django, readers=max(int(os.environ.get("MLXCEL_WEB_THREADS", "16")) // 2, 1))
application = Prefix(bodies, settings.API_PREFIX) if settings.API_PREFIX else bodies
