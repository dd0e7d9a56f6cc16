"""Stateless functions, such as rewards, and the pools that run them."""
