"""Processes that belong to another: how they are started, ended, and spoken to.

Anything in the package may import this one; it imports nothing of the package but
`errors`. What is said over a channel, and what a process does, is its users'.
"""
