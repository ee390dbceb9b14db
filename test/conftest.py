"""Settings and fixtures of the whole suite."""

from hypothesis import HealthCheck, settings

# How long one example takes says more of the machine's other work than of the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
