"""pytest loads this file; the fixtures are in tests/fixtures.py."""

from fixtures import *  # noqa: F403
