"""Environments: the contract of an episode, kinds for other people's environments, and the processes that play them."""
