"""Every touch of SGLang's internals on the language side, one file a seam.

Each file says which SGLang functions it leans on; `test/seams/test_contract.py` states
their signatures and compares them with the installed SGLang. Nothing is imported
from SGLang before SGLang itself imports it (`hooks.py`), so a server that uses no
EPD flag runs exactly as without this package.
"""
