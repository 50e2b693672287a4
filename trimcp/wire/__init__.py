"""What may be said: every message and payload of the five revisions, as inert attrs values. No I/O, no Trio.

Nothing is imported here; take names from the module that tells their story (`content`, `tools`, ...).
"""
