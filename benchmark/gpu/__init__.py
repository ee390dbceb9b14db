"""What one GPU shows in minutes: parts that `run.py` runs one after the other.

A part is a script of its own, which writes a JSON file and prints its tables last.
`report.py` makes a page of the files. Nothing here is imported by the package.
"""
