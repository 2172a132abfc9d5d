"""Number formats of weights and activations, and layers that compute with them."""
