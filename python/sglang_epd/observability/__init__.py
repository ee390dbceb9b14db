"""Prometheus metrics, in SGLang's naming.

`prometheus_client` must not be imported before SGLang has chosen its multiprocess
directory, so these modules are imported by servers, never while plug-ins register.
"""
