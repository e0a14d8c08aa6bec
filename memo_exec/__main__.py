"""Makes ``python -m memo_exec`` run the same command line as ``memo-exec``."""

from memo_exec.cli import main

if __name__ == "__main__":
    main()
