"""Tests against real servers: SGLang, this package's encoder, Mooncake and the mini-lb."""
