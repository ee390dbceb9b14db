"""The parts of scripts/observe: who receives spans, draws them, and asks Prometheus."""
