"""Prefill and decode on different servers: keys and values of prompts over sockets (Splitwise, arXiv:2311.18677).

Ownership: pools and sequences belong to the engine's thread (:mod:`.exports` on the prefill server, :mod:`.imports` on
the decode server); connections belong to a thread with an event loop (:mod:`.server`, :mod:`.client`). What crosses is
posted calls one way, and frames to send the other way.
"""
