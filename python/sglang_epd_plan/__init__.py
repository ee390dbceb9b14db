"""The planner: a discrete-event model of a deployment, and a search for the smallest one that
meets an SLO.

`sglang-epd plan` (`command`, `answers`) reads plain data: a `profile` (what work costs on a
machine), a `workload` (which requests arrive, and when) and a `topology` (how many servers of
which kind). `model` puts `clients`, `dispatch`, `encoders`, `transfer` and `language` (with
`prefill` and `decode`) together and runs them; a run ends in a `report.Report`. `goodput` and
`planning` make many runs.

This is a package of its own beside `sglang_epd`, which does not import it. It imports the
parts of `sglang_epd` that decide: dispatch policies, retry budget, fair queue, embedding cache
and the arena's allocator. Nothing here opens a socket; the only clock is the simulated one.
"""
