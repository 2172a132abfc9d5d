"""Tensor placement and lifetimes: tiered store, arenas, the meter, the key/value pool."""
