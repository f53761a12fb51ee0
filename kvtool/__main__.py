"""`python -m kvtool`: the command line."""

from kvtool.cli import main

main()
