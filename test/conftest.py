"""Settings and fixtures of the whole suite."""

import gc

from hypothesis import HealthCheck, settings

# How long one example takes says more of the machine's other work than of the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_finish() -> None:
    """What has been imported by now stays: a test's `gc.collect()` need not go through it."""
    gc.freeze()
