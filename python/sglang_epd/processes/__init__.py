"""Processes that belong to another: how they are started, ended, and spoken to.

Anything in the package may import this one; it imports nothing of the package but
`errors`. The messages of a channel, and the work of a process, belong to its users.
"""
