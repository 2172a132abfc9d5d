"""Machines that differ, come and go: inference and training over peers of a network (Petals, arXiv:2209.01188; SWARM,
arXiv:2301.11913).

Policies (:mod:`.policies`) are plain functions that servers, clients and the simulation of thousands
(:mod:`.simulate`) share. Peers find each other by announcements that expire (:mod:`.announcements`), and ask each other
over authenticated connections (:mod:`.link`), with activations in 8 bits (:mod:`.wire`).
"""
