"""Processes on devices: the agent beside an engine, the trainer, hosts that lend their device, residents of pools."""
