"""What the journals of runs say: figures, events, trajectories. Nothing here writes to a journal."""
