"""`python -m tailrace`: the command line, in a fresh interpreter, because `-m` puts the working
directory before the standard library.
"""

from tailrace.launcher import run_isolated

run_isolated()
