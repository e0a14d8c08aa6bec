"""The commands of ``memo-exec`` as functions: run, calibrate, compare and doctor, and the files that they write.

``cli`` parses options. Kernels and tensors are in other folders.
"""
