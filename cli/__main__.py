"""`python -m cli`: the `sealring` command without its entry-point script."""

from cli.main import main

main()
