"""The agents of a run on several nodes: one leads, the others follow it over mutual TLS.

All modules but `links` import protobuf and cryptography, so only a run on several nodes loads them.
"""
