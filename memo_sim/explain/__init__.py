"""Why an answer is as it is: what binds, why the runner-up loses, which options would help.

It reads finished results and changes none of them.
"""
