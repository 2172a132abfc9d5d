"""Fleets: several inference servers behind one endpoint.

A router forwards OpenAI requests to servers (Ridgeline's, vLLM's, any with the same API) by their load, by the prefixes
that they hold and by the adapters that they serve; it watches their health, retries what has no first token yet, drains
members, and limits tenants.
"""
