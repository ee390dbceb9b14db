"""Processes that belong to another: how they are started, ended, and spoken to.

The messages of a channel, and the work of a process, belong to its users.
"""
