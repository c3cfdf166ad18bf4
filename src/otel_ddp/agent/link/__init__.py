"""The agents of a run on several nodes: one leads, the others follow it over mutual TLS.

All but `links` imports protobuf and cryptography: only an agent that has a run on several nodes
imports it.
"""
