"""Forward and backward of each operator as explicit kernels, one backend a file."""
