"""A discrete-event model of a deployment, and the planner that asks it.

What goes in is plain data: a `profile` (what work costs on a machine), a `workload` (who
asks for what, and when) and a `topology` (how many servers of which kind). `model` puts
the parts together and runs them: `clients`, `dispatch`, `encoders`, `transfer` and
`language` (with `prefill` and `decode`). What comes out is a `report.Report`. `goodput` and
`planning` run many of them.

Decisions are those of the package itself: its dispatch policies and retry budget, the
encoder's fair queue and batch bounds, the embedding cache and the arena's allocator are
imported, not imitated. May import `encoder`, `dispatch`, `transfer`, `cache`, `config` and
`errors`; nothing here opens a socket, and the only clock is the simulated one.
"""
