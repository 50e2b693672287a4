"""What a server keeps in Redis, for processes on many machines. Needs the extra `trimcp[redis]`."""
