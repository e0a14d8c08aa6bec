"""What a step really asks of the allocator, on a GPU or with fake tensors, compared with the program's buffers.

Times are recorded by ``interpreter``, not here.
"""
