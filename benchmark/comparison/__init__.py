"""What `compare.py` is made of: arms and workloads as data, clients, figures, pages.

Nothing here imports SGLang; `sglang.bench_serving` runs in a process of its own. An arm
knows nothing of workloads, and the requests of a workload nothing of the arm that they are
sent to. What was measured is raw JSON; figures, pages and plots are made of that alone.
"""
