"""The messages between servers: typed, versioned messages and raw tensor frames.

Nothing here opens a socket or knows its peers. It imports only `errors`,
and torch where there is a tensor; every other folder may import it. No message is ever
pickled, and every bound is checked before anything is allocated.
"""
