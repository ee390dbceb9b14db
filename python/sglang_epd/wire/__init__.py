"""The messages between servers: typed, versioned messages and raw tensor frames.

Nothing here knows its peers. No message is ever pickled, and every bound is checked before
anything is allocated.
"""
