"""This machine: files, processes, signals, logs, cores, memory that is parked. No room of ours is known here."""
