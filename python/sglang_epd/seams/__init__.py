"""Every touch of SGLang's internals on the language side, one file a seam.

Each file says which SGLang functions it leans on; `contract` states their signatures, and
`test/seams/test_contract.py` compares them with the installed SGLang. Nothing is imported
from SGLang before SGLang itself imports it (`hooks.py`), so a server that uses no
EPD flag runs exactly as without this package.
"""
