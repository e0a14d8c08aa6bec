"""What the executor adds to torch on a CPU: seconds of dispatch, and of offloading beside torch's own."""
