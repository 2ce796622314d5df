"""What has to be on this machine."""
from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Ends the running test: a skip that says what is missing, or a failure in CI, where everything has to be there."""
    if os.environ.get("CI") == "1":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
