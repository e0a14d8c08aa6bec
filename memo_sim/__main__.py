"""``python -m memo_sim`` is ``memo-sim``."""

from memo_sim.cli import main

main()
