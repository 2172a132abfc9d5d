"""Where tensors lie and how long: tiered store, arenas, the meter, the key/value pool."""
