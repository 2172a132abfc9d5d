"""Memory: recomputation, offload to host and disk, swapping, static allocation plans."""
