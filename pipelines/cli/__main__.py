"""`python -m pipelines.cli`: how jobs on a cluster call the command line."""

from pipelines.cli.main import main

main()
