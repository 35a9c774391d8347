"""Own kernels. The only place that imports triton at module level; nothing imports this package eagerly."""
