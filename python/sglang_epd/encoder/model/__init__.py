"""The vision tower and what it is given, in the process that holds it."""
