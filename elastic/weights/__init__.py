"""Versions of the weights: publishing, encoding, signing, storing on a relay, pulling, verifying and applying them.

A worker serves only weights that the run's trainer has signed, and never half a version.
"""
