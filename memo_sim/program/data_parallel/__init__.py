"""What replicas of a layer do together: gradient reduction, ZeRO sharding, the optimizer's step.

The forward and backward of a layer are in ``layers``.
"""
