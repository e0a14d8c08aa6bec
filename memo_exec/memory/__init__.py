"""Where buffers live: caching store, planned arena and host slab."""
