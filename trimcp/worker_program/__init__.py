"""The program that runs in a worker process."""
