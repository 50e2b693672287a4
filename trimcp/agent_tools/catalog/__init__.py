"""The tools that agents register with a server: who may, in which versions, and who carries them out."""
