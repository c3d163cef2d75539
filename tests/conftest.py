"""pytest loads this file; the fixtures are in fixtures.py."""

from fixtures import *  # noqa: F403
