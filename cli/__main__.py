"""`python -m sealring.cli`: the `sealring` command without its entry-point script."""

from sealring.cli.main import main

main()
