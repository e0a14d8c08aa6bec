"""What ``memo-exec`` does, as functions: run, calibrate, compare, doctor, and the files they write.

Option parsing is in ``cli``; nothing here touches a tensor itself.
"""
