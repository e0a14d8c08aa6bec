"""``python -m memo_exec`` is ``memo-exec``."""

from memo_exec.cli import main

if __name__ == "__main__":
    main()
